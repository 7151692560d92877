"""ComputeStats: checks the items, then reduces them on a thread, torch loaded when first asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paramd.errors import UsageError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.snapshot import Snapshot


async def compute_stats(
    rank: RankSidecar,
    snapshot: Snapshot,
    items: Sequence[pb.StatsItem],
    *,
    with_exponents: bool,
) -> list[pb.Stats]:
    """One answer for each item, in order. The caller holds the snapshot until it returns.

    Cancelling takes effect between two items, and is waited for: the thread reads the
    snapshot's memory.

    Raises:
        UsageError: an item leaves the snapshot, or its dtype has no statistics.
    """
    stop: list[bool] = []
    work = asyncio.get_running_loop().run_in_executor(
        rank.stats_executor, _reduce_all, rank, snapshot.view(), items, with_exponents, stop
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.append(True)
        await asyncio.wait([work])
        raise


def _reduce_all(
    rank: RankSidecar,
    data: memoryview,
    items: Sequence[pb.StatsItem],
    with_exponents: bool,
    stop: Sequence[bool],
) -> list[pb.Stats]:
    from paramd_service.sidecar import stats

    stats.set_up()
    runs = [_run_of(data, item, stats.item_bytes(item.dtype)) for item in items]
    answers = []
    for item, run in zip(items, runs, strict=True):
        if stop:
            break
        answers.append(
            _answer(stats, stats.reduce_run(run, item.dtype, with_exponents=with_exponents))
        )
        rank.faults.at("stats-item")
    return answers


def _run_of(data: memoryview, item: pb.StatsItem, itemsize: int) -> memoryview:
    size_bytes = item.numel * itemsize
    if not (0 <= item.begin_bytes <= len(data) and 0 <= size_bytes <= len(data) - item.begin_bytes):
        raise UsageError(
            f"items: {item.numel} elements of {item.dtype} from byte {item.begin_bytes} on leave "
            f"the snapshot of {len(data)} bytes"
        )
    return data[item.begin_bytes : item.begin_bytes + size_bytes]


def _answer(stats: Any, reduced: Any) -> pb.Stats:
    return pb.Stats(
        count=reduced.count,
        zero_count=reduced.zero_count,
        nan_count=reduced.nan_count,
        inf_count=reduced.inf_count,
        mean=reduced.mean,
        m2=reduced.m2,
        sum_squares=reduced.sum_squares,
        min=reduced.min,
        max=reduced.max,
        exponent_counts=stats.exponent_counts(reduced),
        exponent_begin=stats.EXPONENT_BEGIN,
    )
