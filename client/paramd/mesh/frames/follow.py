"""Streams of parameters, for evaluation jobs and inference engines.

Steps are pinned ahead, as for gradients. Before a read, each rank digests what it pinned;
tensors whose digests are unchanged since the last frame are not read again, unless the user has
written to them. With deltas, of those that changed only the elements that did are sent
(mirrors.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

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
from paramd.mesh.reading.stream import Transport, memory_at
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


class _Handed:
    """Tensors that a user has, given again where they have not changed in the training.

    The user may write to them. A version counter would not tell: writes through `.data` or NumPy
    do not count. So a digest of each is kept, and compared before it is given again; it takes a
    sixth of the time of a copy into fresh memory, and no memory.
    """

    def __init__(self, transfer: Transfer, names: Sequence[tuple[str, ...]]) -> None:
        """`names`: of each tensor of a plan."""
        self._transfer = transfer
        self._names = names
        self._digests: dict[int, bytes] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    async def take(self, numbers: Sequence[int], found: Mapping[str, torch.Tensor]) -> None:
        """Take new tensors, by index and by name."""
        for number in numbers:
            self._digests.pop(number, None)
        self.tensors |= found
        self._digests |= await self._digested(numbers)

    async def spoiled(self, changed: Collection[int]) -> list[int]:
        """Those that are not as they were given out, apart from `changed`, whose turn comes
        anyway."""
        numbers = [n for n in range(len(self._names)) if n not in changed]
        found = await self._digested([n for n in numbers if n in self._digests])
        return [n for n in numbers if n not in found or found[n] != self._digests[n]]

    async def _digested(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return await self._transfer.run(
            lambda: {number: _digest_of(self.tensors[self._names[number][0]]) for number in numbers}
        )


def _digest_of(tensor: torch.Tensor) -> bytes:
    """Of the bytes, shape and dtype; empty for what was put elsewhere or laid out otherwise."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return b""
    size_bytes = tensor.numel() * tensor.element_size()
    memory = memory_at(tensor.data_ptr(), size_bytes) if size_bytes else b""
    return xxh3_128_digest(memory) + f"{tensor.dtype} {list(tensor.shape)}".encode()


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
        ] or [(min(sidecars.document.peers, default=0), ())]
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
        self._handed = _Handed(transfer, names)
        self._due: set[int] = set()
        """Tensors that have changed since they were last given out."""
        self._mirrors = Mirrors(transfer, plan, wanted.transport) if wanted.deltas else None

    async def hold(self, sidecars: Sidecars, at: At, timeout_s: float) -> PinnedStep:
        """As `Steps.hold`."""
        return await hold_step(sidecars, self._requests, at, timeout_s)

    def release(self, held: PinnedStep) -> None:
        """As `Steps.release`."""
        held.release()

    async def read(self, sidecars: Sidecars, at: At, dropped: int, held: PinnedStep) -> ParamFrame:
        """The frame: changed tensors read, the others those of the last frame.

        Of the others, those that the user has written to are made again.
        """
        deadline_s = time.monotonic() + READ_S
        pinned = Pinned.at(held.state, held.pins)
        if self._mirrors is not None:
            found = await self._refresh(self._mirrors, sidecars, pinned, deadline_s)
        else:
            found = await self._read_changed(sidecars, pinned, deadline_s)
        self._due.clear()
        return ParamFrame(
            {name: self._handed.tensors[name] for names in self._names for name in names},
            changed=[name for number in found.changed for name in self._names[number]],
            job=sidecars.document.job,
            incarnation=held.state.incarnation,
            history=at.history,
            step=at.step,
            dropped=dropped,
            sent_bytes=found.sent_bytes,
            changed_bytes=found.changed_bytes if self._mirrors is not None else None,
        )

    async def _refresh(
        self, mirrors: Mirrors, sidecars: Sidecars, pinned: Pinned, deadline_s: float
    ) -> Refreshed:
        """Bring up the mirrors, and make what changed of them."""
        found = await mirrors.refresh(sidecars, pinned, deadline_s)
        self._due.update(found.changed)
        made = await self._to_make()
        await self._handed.take(made, await self._landed(mirrors, made))
        return replace(found, changed=tuple(sorted(self._due)))

    async def _read_changed(
        self, sidecars: Sidecars, pinned: Pinned, deadline_s: float
    ) -> Refreshed:
        """Read the tensors whose digests changed, whole."""
        digests = await self._digested(sidecars, pinned, deadline_s)
        self._due.update(
            number
            for number, found in enumerate(digests)
            if not self._digests or found != self._digests[number]
        )
        self._digests = digests
        made = await self._to_make()
        await self._handed.take(made, await self._read_tensors(sidecars, pinned, made, deadline_s))
        reads = self._plan.only(made).ranks
        sent_bytes = sum(one.size_bytes for read in reads for one in read.landings)
        return Refreshed(tuple(sorted(self._due)), sent_bytes, sent_bytes)

    async def _to_make(self) -> list[int]:
        """What has changed, in the training or by the user."""
        return sorted({*self._due, *await self._handed.spoiled(self._due)})

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
