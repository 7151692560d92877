"""Sample parameters and gradients from live sidecars.

Samples are read as users' reads are (pin, renew, release), and disturb training no more. The rules
over them are pure: `values`, `courses`, `drift`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paramd.layout.dtypes import DTYPES
from paramd.layout.select import SelectedTensor
from paramd.layout.types import Layout, TensorLayout, full_box, offsets_in
from paramd.mesh.reading.pin import Pinner
from paramd.mesh.reading.stream import Reading
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.alerts.config import Rule
from paramd_service.alerts.courses import Sampled
from paramd_service.alerts.drift import (
    Difference,
    ReplicaGroup,
    Spans,
    ask_where,
    compare,
    spans_of,
)

if TYPE_CHECKING:
    from paramd.mesh.peers.discovery import SidecarFinder
    from paramd.mesh.peers.sidecars import Sidecars

TENSOR_RULES = frozenset({Rule.NON_FINITE, Rule.NORM_JUMP})

# Unordered, or without arithmetic in torch: sidecars refuse statistics of these.
NO_STATS = frozenset(name for name, one in DTYPES.items() if not one.reduced)

MAX_PLACES = 8
"""Most differences per round that are located; each costs a few calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInput:
    """Statistics of one full tensor at one step."""

    fqn: str
    count: int
    nan_count: int
    inf_count: int
    norm: float
    """Of the finite elements; NaN if there are elements and none is finite."""
    ranks: tuple[int, ...] = ()
    """Ranks whose part is not finite, where they are known."""

    @classmethod
    def of(cls, fqn: str, told: Mapping[str, Any], ranks: tuple[int, ...] = ()) -> TensorInput:
        """From a document of statistics."""
        norm = told["norm"] if told["norm"] is not None else math.nan
        counts = {name: told[name] for name in ("count", "nan_count", "inf_count")}
        return cls(fqn=fqn, norm=norm, ranks=ranks, **counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatsRound:
    """Statistics of sampled tensors."""

    step: int
    tensors: tuple[TensorInput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientRound:
    """Statistics of the gradients that one update consumes."""

    step: int
    """-1 if no update came in time."""
    tensors: tuple[TensorInput, ...] = ()
    """As the optimizer gets them."""
    absent: tuple[str, ...] = ()
    """Tensors without a gradient although they require one."""
    frozen: tuple[str, ...] = ()
    """Tensors that require none any more, or never did."""
    factor: float = 1.0
    """What their norms are multiplied by to undo loss scale and clipping."""

    def sampled(self) -> list[Sampled]:
        """As a course takes them."""
        found = [
            Sampled(fqn=one.fqn, norm=one.norm * self.factor)
            for one in self.tensors
            if not one.nan_count and not one.inf_count
        ]
        return found + [Sampled(fqn=fqn, norm=0.0, absent=True) for fqn in self.absent]


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestRound:
    """Compared replicas."""

    step: int
    differences: tuple[Difference, ...]
    places: Mapping[int, str]
    """Location of a difference, in words, by its index; for the first few only."""


class MeshSampler:
    """Access to an incarnation's sidecars. All methods raise ParamdError."""

    def __init__(self, reaching: Callable[[], Awaitable[SidecarFinder]]) -> None:
        """No I/O. `reaching` opens the connections to the sidecars."""
        self._reaching = reaching

    async def layout(self) -> Layout:
        reach = await self._reaching()

        async def attempt(sidecars: Sidecars) -> Layout:
            return (await reach.index(sidecars)).layout

        return await reach.attempts(attempt, time.monotonic() + 30.0)

    async def stats(self, tensors: Sequence[TensorLayout], *, timeout_s: float) -> StatsRound:
        from paramd.layout.plan import plan_read
        from paramd.mesh.reading.pin import while_pinned
        from paramd.mesh.reading.reductions import compute_stats
        from paramd.mesh.reading.transfer import Chosen

        reach, deadline_s = await self._reaching(), time.monotonic() + timeout_s
        chosen = [
            SelectedTensor(tensor, tensor.fqn, full_box(tensor.shape), (tensor.fqn,))
            for tensor in tensors
            if tensor.dtype not in NO_STATS
        ]

        async def choosing(sidecars: Sidecars) -> Chosen:
            layout = (await reach.index(sidecars)).layout
            return Chosen((), plan_read(layout, chosen, costs=reach.costs()), layout.mirrored)

        table = await while_pinned(reach, choosing, compute_stats, deadline_s)
        rows = (TensorInput.of(row.name, row.summary.document()) for row in table)
        return StatsRound(step=table.step if table else -1, tensors=tuple(rows))

    async def gradients(self, patterns: Sequence[str], *, timeout_s: float) -> GradientRound:
        """Statistics of the gradients that one of the next updates consumes; none if no update
        comes in time, as in paused training."""
        from paramd.mesh.frames.grads import REASONS, GradRequest, open_stream
        from paramd.mesh.reading.transfer import Transfer

        wanted = GradRequest(patterns=tuple(patterns), every=1, kind="stats", transport="auto")
        missing, on_purpose = REASONS[pb.NO_GRADIENT_NONE], REASONS[pb.NO_GRADIENT_FROZEN]
        reach = await self._reaching()
        with closing(Transfer()) as transfer, suppress(TimeoutError):
            stream = await open_stream(reach, transfer, wanted)
            async with aclosing(stream.frames()) as frames, asyncio.timeout(timeout_s):
                async for frame in frames:
                    found = [one for one in frame.document()["params"] if one["none"] is None]
                    bad = frame.bad_ranks
                    return GradientRound(
                        step=frame.step,
                        tensors=tuple(
                            TensorInput.of(one["name"], one, tuple(bad.get(one["name"], ())))
                            for one in found
                        ),
                        absent=tuple(name for name, why in frame.none.items() if why == missing),
                        frozen=tuple(name for name, why in frame.none.items() if why == on_purpose),
                        factor=_undone(frame.scale, frame.clip_factor),
                    )
        return GradientRound(step=-1)

    async def digests(self, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> DigestRound:
        reach, deadline_s = await self._reaching(), time.monotonic() + timeout_s
        spans = spans_of(groups)

        async def attempt(sidecars: Sidecars) -> DigestRound:
            mirrored = (await reach.index(sidecars)).layout.mirrored
            pinner = Pinner(sidecars, backoff=reach.backoff)
            async with pinner.pinned(spans, deadline_s=deadline_s, with_buffers=mirrored) as pinned:
                reading = Reading(sidecars, pinned, deadline_s)
                return await digests_of(reach, reading, spans, groups)

        return await reach.attempts(attempt, deadline_s)


def _undone(scale: float, clip_factor: float | None) -> float:
    """What norms are multiplied by to undo loss scale and clipping, which hide what they are."""
    factor = 1.0
    if math.isfinite(scale) and scale > 0:
        factor /= scale
    if clip_factor is not None and math.isfinite(clip_factor) and clip_factor > 0:
        factor /= clip_factor
    return factor


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of one set of pinned snapshots: bytes of several ranks at one step."""

    reach: SidecarFinder
    reading: Reading
    spans: Spans

    async def ask(self, rank: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Digests of byte ranges of the rank's arena, all within its spans."""
        offset_of = offsets_in(self.spans[rank])
        moved = [(offset_of(begin), offset_of(begin) + end - begin) for begin, end in ranges]
        return await self.reading.digests(rank, moved)


async def digests_of(
    reach: SidecarFinder, reading: Reading, spans: Spans, groups: Sequence[ReplicaGroup]
) -> DigestRound:
    """Compare the groups' replicas, whose `spans` are pinned."""
    all_digests = Digests(reach, reading, spans)
    asked: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        for rank in group.begins:
            asked.setdefault(rank, []).append(index)

    async def of(rank: int) -> list[bytes]:
        parts = [groups[index] for index in asked[rank]]
        ranges = [(g.begins[rank], g.begins[rank] + g.size_bytes) for g in parts]
        return await all_digests.ask(rank, ranges)

    answers = await asyncio.gather(*(of(rank) for rank in asked))
    digests: list[dict[int, bytes]] = [{} for _ in groups]
    for rank, found in zip(asked, answers, strict=True):
        for index, digest in zip(asked[rank], found, strict=True):
            digests[index][rank] = digest
    differences = tuple(
        difference
        for group, by_rank in zip(groups, digests, strict=True)
        if (difference := compare(group, by_rank)) is not None
    )
    places = {
        index: await ask_where(all_digests, difference)
        for index, difference in enumerate(differences[:MAX_PLACES])
    }
    return DigestRound(step=reading.pinned.state.step, differences=differences, places=places)
