"""Statistics of full tensors, merged from each rank's reduction."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from paramd.errors import ConflictError
from paramd.layout.plan import ReadPlan
from paramd.layout.stats import (
    EMPTY,
    Stats,
    StatsItem,
    merge,
    merge_all,
    stats_items,
    stats_of,
    summarize,
)
from paramd.mesh.peers.sidecars import Pinned, RankPin, Sidecars
from paramd.mesh.results import StatsTable, TensorStats
from paramd.v1 import sidecar_pb2

ITEMS_PER_CALL = 2_000
"""Keeps messages far below gRPC's size limit."""


async def compute_stats(
    sidecars: Sidecars,
    plan: ReadPlan,
    pinned: Pinned,
    deadline_s: float,
    *,
    with_exponents: bool,
    edges: Sequence[float] = (),
    before: Pinned | None = None,
) -> StatsTable:
    """Reduce each rank's share of the plan on its sidecar, and merge.

    `edges` (finite, rising) add counts of the elements between them. With `before`, pins of the
    same plan, the statistics are those of the differences.
    """
    items = stats_items(plan)
    merged = [EMPTY] * len(plan.tensors)
    found = await compute_parts(
        sidecars,
        pinned,
        items,
        deadline_s,
        with_exponents=with_exponents,
        edges=edges,
        before=before,
    )
    for item, stats in found:
        merged[item.tensor] = merge(merged[item.tensor], stats)
    rows = [
        TensorStats(
            name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, summary=summarize(stats)
        )
        for tensor, stats in zip(plan.tensors, merged, strict=True)
    ]
    whole = merge_all(merged)
    dtypes = {tensor.dtype for tensor in plan.tensors}
    total = TensorStats(
        name="total",
        dtype=dtypes.pop() if len(dtypes) == 1 else "",
        shape=(whole.count,),
        summary=summarize(whole),
    )
    return StatsTable(
        rows,
        total=total,
        job=sidecars.document.job,
        incarnation=pinned.incarnation,
        step=pinned.step,
        history=pinned.history,
        unsettled=pinned.unsettled,
        label=pinned.label,
    )


async def compute_parts(
    sidecars: Sidecars,
    pinned: Pinned,
    items: Mapping[int, Sequence[StatsItem]],
    deadline_s: float,
    *,
    with_exponents: bool,
    edges: Sequence[float] = (),
    before: Pinned | None = None,
) -> list[tuple[StatsItem, Stats]]:
    """Reduce each rank's items on its sidecar."""
    found = await asyncio.gather(
        *(
            _rank_stats(
                sidecars,
                pinned,
                rank,
                items[rank],
                deadline_s,
                with_exponents,
                edges,
                before.pins[rank] if before is not None else None,
            )
            for rank in items
            if items[rank]
        )
    )
    return [one for of_rank in found for one in of_rank]


async def _rank_stats(
    sidecars: Sidecars,
    pinned: Pinned,
    rank: int,
    items: tuple[StatsItem, ...],
    deadline_s: float,
    with_exponents: bool,
    edges: Sequence[float],
    before: RankPin | None,
) -> list[tuple[StatsItem, Stats]]:
    found: list[tuple[StatsItem, Stats]] = []
    for begin in range(0, len(items), ITEMS_PER_CALL):
        batch = items[begin : begin + ITEMS_PER_CALL]
        request = [
            sidecar_pb2.StatsItem(begin_bytes=i.begin_bytes, numel=i.numel, dtype=i.dtype)
            for i in batch
        ]
        answer = await sidecars.stats(
            pinned.pins[rank],
            request,
            deadline_s - time.monotonic(),
            with_exponents=with_exponents,
            edges=edges,
            before=before,
        )
        said = (answer.header.incarnation, answer.header.step)
        counts = [stats.count for stats in answer.stats]
        if said != (pinned.incarnation, pinned.step) or counts != [item.numel for item in batch]:
            raise ConflictError(
                f"{sidecars.who(rank)} returned {len(counts)} statistics of {sum(counts):,} "
                f"elements of step {said[1]}; expected {len(batch)} of "
                f"{sum(item.numel for item in batch):,} of step {pinned.step}; try again"
            )
        found.extend(zip(batch, map(stats_of, answer.stats), strict=True))
    return found
