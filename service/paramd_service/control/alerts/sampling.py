"""Fetch statistics and digests of sampled parameters from live sidecars, each at one step.

Sampling takes the same path as users' reads (pin, renew, release), so it disturbs training no
more than they do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paramd.errors import ConflictError
from paramd.layout.dtypes import DTYPES
from paramd.layout.regions import full_box
from paramd.layout.select import SelectedTensor
from paramd.layout.types import Layout, TensorLayout
from paramd.mesh.reading.pin import Pinner
from paramd_service.control.alerts.drift import (
    Difference,
    ReplicaGroup,
    Spans,
    ask_where,
    compare,
    place_of,
    spans_of,
)
from paramd_service.control.alerts.tensors import TensorInput

if TYPE_CHECKING:
    from paramd.mesh.peers.discovery import SidecarFinder
    from paramd.mesh.peers.pins import Pinned
    from paramd.mesh.peers.sidecars import Sidecars

# Unordered, or without arithmetic in torch: sidecars refuse statistics of these.
NO_STATS = frozenset(name for name, one in DTYPES.items() if not one.reduced)

MAX_PLACES = 8
"""Most differences per round that are located; each costs a few calls."""

RANGES_PER_CALL = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StatsRound:
    """Statistics of sampled tensors."""

    step: int
    tensors: tuple[TensorInput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestRound:
    """Compared replicas."""

    step: int
    differences: tuple[Difference, ...]
    places: Mapping[int, str]
    """Location of a difference, in words, by its index; only for the first few."""


class Sampler(Protocol):
    """Access to the sidecars. All methods raise ParamdError."""

    async def layout(self) -> Layout:
        """The current layout."""

    async def stats(self, tensors: Sequence[TensorLayout], *, timeout_s: float) -> StatsRound:
        """Statistics of full tensors."""

    async def digests(self, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> DigestRound:
        """Compare the groups' replicas."""


class MeshSampler:
    """A `Sampler` over an incarnation's sidecars."""

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
        from paramd.mesh.reading.summary import compute_stats

        reach, deadline_s = await self._reaching(), time.monotonic() + timeout_s
        chosen = [
            SelectedTensor(tensor, tensor.fqn, full_box(tensor.shape), (tensor.fqn,))
            for tensor in tensors
            if tensor.dtype not in NO_STATS
        ]

        async def attempt(sidecars: Sidecars) -> StatsRound:
            index = await reach.index(sidecars)
            plan = plan_read(index.layout, chosen, prefer=reach.costs())
            if not plan.ranks:
                return StatsRound(step=-1, tensors=())
            spans: Spans = {read.rank: read.spans for read in plan.ranks}
            pinner = Pinner(sidecars, backoff=reach.backoff)
            async with pinner.pinned(
                spans, deadline_s=deadline_s, with_buffers=index.layout.mirrored
            ) as pinned:
                table = await compute_stats(
                    sidecars, plan, pinned, deadline_s, with_exponents=False
                )
            rows = tuple(
                TensorInput(
                    fqn=row.name,
                    count=row.summary.count,
                    nan_count=row.summary.nan_count,
                    inf_count=row.summary.inf_count,
                    norm=row.summary.norm,
                )
                for row in table
            )
            return StatsRound(step=table.step, tensors=rows)

        return await reach.attempts(attempt, deadline_s)

    async def digests(self, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> DigestRound:
        reach, deadline_s = await self._reaching(), time.monotonic() + timeout_s
        spans = spans_of(groups)

        async def attempt(sidecars: Sidecars) -> DigestRound:
            mirrored = (await reach.index(sidecars)).layout.mirrored
            pinner = Pinner(sidecars, backoff=reach.backoff)
            async with pinner.pinned(spans, deadline_s=deadline_s, with_buffers=mirrored) as pinned:
                return await _compared(_Pinned(reach, sidecars, pinned, spans, deadline_s), groups)

        return await reach.attempts(attempt, deadline_s)


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Digests of one set of pinned snapshots; implements `places.Digests`."""

    reach: SidecarFinder
    sidecars: Sidecars
    pinned: Pinned
    spans: Spans
    deadline_s: float

    async def ask(self, rank: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Digests of byte ranges of the rank's arena, all within its spans."""
        found: list[bytes] = []
        offset_of = place_of(self.spans[rank])
        moved = [(offset_of(begin), offset_of(begin) + end - begin) for begin, end in ranges]
        for first in range(0, len(moved), RANGES_PER_CALL):
            batch = moved[first : first + RANGES_PER_CALL]
            answer = await self.sidecars.digests(
                self.pinned.pins[rank], batch, self.deadline_s - time.monotonic()
            )
            said = (answer.header.epoch, answer.header.step, len(answer.digests))
            if said != (self.pinned.epoch, self.pinned.step, len(batch)):
                raise ConflictError(
                    f"{self.sidecars.who(rank)} answered {said[2]} digests of epoch {said[0]}, "
                    f"step {said[1]}; asked were {len(batch)} of epoch {self.pinned.epoch}, "
                    f"step {self.pinned.step}; try again"
                )
            found.extend(answer.digests)
        return found


async def _compared(pinned: _Pinned, groups: Sequence[ReplicaGroup]) -> DigestRound:
    asked: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        for rank in group.begins:
            asked.setdefault(rank, []).append(index)

    async def of(rank: int) -> list[bytes]:
        parts = [groups[index] for index in asked[rank]]
        ranges = [(g.begins[rank], g.begins[rank] + g.size_bytes) for g in parts]
        return await pinned.ask(rank, ranges)

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
        index: await ask_where(pinned, difference)
        for index, difference in enumerate(differences[:MAX_PLACES])
    }
    return DigestRound(step=pinned.pinned.step, differences=differences, places=places)
