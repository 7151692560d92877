"""Streams of parameters, for evaluation jobs and inference engines.

Steps are pinned ahead, as for gradients. Before a read, each rank digests what it pinned;
tensors whose digests are unchanged since the last frame are not read again. With deltas, of those
that changed only the elements that did are sent (mirrors.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paramd.errors import ConflictError, UsageError
from paramd.layout.plan import RankRead, ReadPlan, plan_read
from paramd.layout.select import select
from paramd.mesh.frames.frames import ParamFrame
from paramd.mesh.frames.mirrors import Mirrors, Refreshed
from paramd.mesh.frames.stepping import (
    CAPTURE_LEASE_S,
    PinnedStep,
    ReachLike,
    StepStream,
    hold_step,
)
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.stream import Transport
from paramd.mesh.reading.transfer import Chosen, Transfer
from paramd.state import At, StateName
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

READ_S = 60.0
RANGES_PER_CALL = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowRequest:
    """A subscription to parameters; see `AsyncMesh.follow`."""

    patterns: tuple[str, ...]
    every: int = 1
    """Frames are of updates whose number is a multiple of this; 1 or more."""
    dtype: torch.dtype | None = None
    """Of the tensors; None keeps each one's own."""
    transport: Transport = "auto"
    deltas: bool = False
    """Have the elements that changed sent, where that takes fewer bytes."""

    def __post_init__(self) -> None:
        if not self.patterns:
            raise UsageError("no pattern was given; expected at least one, '*' follows all")
        if self.every < 1:
            raise UsageError(f"every: {self.every}; expected 1 or more")


class FollowSteps:
    """Pins parameters and reads what changed, for a `StepStream` that chooses the steps."""

    def __init__(
        self,
        sidecars: Sidecars,
        transfer: Transfer,
        wanted: FollowRequest,
        plan: ReadPlan,
        names: Sequence[tuple[str, ...]],
    ) -> None:
        self._transfer = transfer
        self._wanted = wanted
        self._plan = plan
        self._names = names
        reads: Iterable[tuple[int, Sequence[tuple[int, int]]]] = [
            (read.rank, read.spans) for read in plan.ranks
        ] or [(min(sidecars.document.peers), ())]
        self._requests = {
            rank: pb.PinSnapshotRequest(
                incarnation=sidecars.document.incarnation,
                layout_digest=sidecars.document.layout_digest,
                spans=[pb.Span(begin=begin, end=end) for begin, end in spans],
                lease_ms=int(1000 * CAPTURE_LEASE_S),
            )
            for rank, spans in reads
        }
        self.ranks = tuple(self._requests)
        self._digests: list[tuple[bytes, ...]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._mirrors = Mirrors(transfer, plan, wanted.transport) if wanted.deltas else None

    async def hold(self, sidecars: Sidecars, at: At, timeout_s: float) -> PinnedStep:
        """As `Steps.hold`."""
        return await hold_step(sidecars, self._requests, at, timeout_s)

    def release(self, held: PinnedStep) -> None:
        """As `Steps.release`."""
        held.release()

    async def read(self, sidecars: Sidecars, at: At, dropped: int, held: PinnedStep) -> ParamFrame:
        """The frame: changed tensors read, the others taken from the last frame."""
        deadline_s = time.monotonic() + READ_S
        pinned = Pinned.at(held.state, held.pins)
        if self._mirrors is not None:
            found = await self._mirrors.refresh(sidecars, pinned, deadline_s)
            self._tensors |= await self._landed(self._mirrors, found.changed)
        else:
            found = await self._read_changed(sidecars, pinned, deadline_s)
        return ParamFrame(
            {name: self._tensors[name] for names in self._names for name in names},
            changed=[name for number in found.changed for name in self._names[number]],
            job=sidecars.document.job,
            incarnation=held.state.incarnation,
            history=at.history,
            step=at.step,
            dropped=dropped,
            sent_bytes=found.sent_bytes,
            changed_bytes=found.changed_bytes if self._mirrors is not None else None,
        )

    async def _read_changed(
        self, sidecars: Sidecars, pinned: Pinned, deadline_s: float
    ) -> Refreshed:
        """Read the tensors whose digests changed, whole."""
        digests = await self._digested(sidecars, pinned, deadline_s)
        changed = [
            number
            for number, found in enumerate(digests)
            if not self._digests or found != self._digests[number]
        ]
        self._tensors |= await self._read_tensors(sidecars, pinned, changed, deadline_s)
        self._digests = digests
        reads = self._plan.only(changed).ranks
        sent_bytes = sum(one.size_bytes for read in reads for one in read.landings)
        return Refreshed(tuple(changed), sent_bytes, sent_bytes)

    async def _landed(self, mirrors: Mirrors, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """New tensors with these indexes, by name, made from what is here."""
        from paramd.mesh.reading.assemble import Targets

        if not numbers:
            return {}
        plan, names = self._plan.only(numbers), [self._names[number] for number in numbers]
        targets = Targets(plan, names, dtype=self._wanted.dtype, device=None, into=None)
        await mirrors.land(plan, {read.rank: targets.places(read) for read in plan.ranks})
        return targets.results()

    async def _digested(
        self, sidecars: Sidecars, pinned: Pinned, deadline_s: float
    ) -> list[tuple[bytes, ...]]:
        """Digests of each tensor's parts, ordered by rank and landing."""

        async def of(read: RankRead) -> list[bytes]:
            found: list[bytes] = []
            for begin in range(0, len(read.landings), RANGES_PER_CALL):
                ranges = [
                    (one.begin_bytes, one.end_bytes)
                    for one in read.landings[begin : begin + RANGES_PER_CALL]
                ]
                answer = await sidecars.digests(
                    pinned.pins[read.rank], ranges, deadline_s - time.monotonic()
                )
                said = StateName.of(answer.header)
                if said != pinned.state or len(answer.digests) != len(ranges):
                    raise ConflictError(
                        f"{sidecars.who(read.rank)} returned {len(answer.digests)} digests of "
                        f"{said}; expected {len(ranges)} of {pinned.state}"
                    )
                found.extend(answer.digests)
            return found

        answers = await asyncio.gather(*(of(read) for read in self._plan.ranks))
        parts: list[list[bytes]] = [[] for _ in self._plan.tensors]
        for read, digests in zip(self._plan.ranks, answers, strict=True):
            for landing, digest in zip(read.landings, digests, strict=True):
                parts[landing.tensor].append(digest)
        return [tuple(found) for found in parts]

    async def _read_tensors(
        self, sidecars: Sidecars, pinned: Pinned, numbers: Sequence[int], deadline_s: float
    ) -> dict[str, torch.Tensor]:
        return await self._transfer.tensors(
            sidecars,
            Chosen(names=self._names, plan=self._plan, at_boundary=False),
            numbers,
            pinned,
            dtype=self._wanted.dtype,
            transport=self._wanted.transport,
            deadline_s=deadline_s,
        )


async def open_following(
    reach: ReachLike, transfer: Transfer, wanted: FollowRequest
) -> StepStream[PinnedStep, ParamFrame]:
    """Open a subscription; the caller closes it. Raises as `grads.open_stream`."""
    await transfer.load_torch()

    async def attempt(sidecars: Sidecars) -> FollowSteps:
        index = await reach.index(sidecars)
        if index.layout.mirrored:
            raise ConflictError(
                "this job's parameters stay in its trainers' own memory (arena=\"mirror\") and "
                "cannot be followed; use summon, which copies them at a boundary"
            )
        selection = select(index, wanted.patterns, with_buffers=False)
        plan = plan_read(index.layout, selection, prefer=reach.costs())
        names = [item.names for item in selection]
        return FollowSteps(sidecars, transfer, wanted, plan, names)

    steps = await reach.attempts(attempt, time.monotonic() + READ_S)
    return StepStream(reach, steps, steps.read, every=wanted.every)
