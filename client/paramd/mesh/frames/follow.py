"""Streams of parameters, for evaluation jobs and inference engines.

Steps are pinned ahead, as for gradients. Before a read, each rank digests its pins; tensors whose
digests are unchanged since the last frame are not read again, unless the user has written to them.

With deltas, only the changed elements of changed tensors are sent. Each rank's snapshot then has a
mirror here, byte for byte. A refresh asks the rank for the changes since the mirror's step, changes
the mirror in place, and compares every range with the rank's digest of it. Ranges that do not
match, or whose base the rank no longer has, are read whole. Users get tensors made from mirrors, so
writing to one cannot spoil the next frame.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from paramd.deltas import Delta, apply_delta
from paramd.errors import ConflictError, DataLossError
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import RankRead, ReadPlan, plan_read
from paramd.layout.select import Pattern, select
from paramd.memory.left import check_client
from paramd.mesh.frames.frames import ParamFrame
from paramd.mesh.frames.stepping import (
    READ_S,
    PinnedStep,
    ReachLike,
    StepStream,
    StreamRequest,
    hold_step,
)
from paramd.mesh.peers.grpc import all_ended
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.merging import Merger
from paramd.mesh.reading.pin import spans_of
from paramd.mesh.reading.places import Place
from paramd.mesh.reading.stream import Reading, memory_at
from paramd.mesh.reading.transfer import Chosen, Transfer
from paramd.state import At, StateName
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

ITEMS_PER_CALL = 20_000

MAX_ELEMENT_BYTES = 8
"""Larger elements are compared as several."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    changed: tuple[int, ...]
    """Indexes of the plan's tensors that differ from the last frame."""
    sent_bytes: int
    """Bytes that came from the ranks: changes, digests, and ranges read whole."""
    changed_bytes: int
    """Bytes of elements that differ; all of a range that had no base to compare with."""


@dataclass(eq=False, slots=True)
class RankMirror:
    """One rank's snapshot as it was at the last refresh."""

    read: RankRead
    items: tuple[pb.DeltaItem, ...]
    """A range for each landing."""
    memory: torch.Tensor
    digests: list[bytes] = field(default_factory=list)
    """Digest of each range; empty where its content is unknown."""
    wanted: list[bytes] = field(default_factory=list)
    """The rank's digests."""
    shown: list[bytes] = field(default_factory=list)
    """Digests when tensors were last made of the ranges."""
    base: StateName | None = None
    """The state of all that is here; None before the first refresh, or after a failed one."""

    def __post_init__(self) -> None:
        self.digests = [b""] * len(self.items)
        self.wanted, self.shown = list(self.digests), list(self.digests)

    def view(self, index: int) -> memoryview:
        """The bytes of one range, writable."""
        item = self.items[index]
        address = self.memory.data_ptr() + item.begin_bytes
        return memory_at(address, item.end_bytes - item.begin_bytes)

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        ctypes.memmove(address, self.memory.data_ptr() + offset_bytes, size_bytes)

    def changed_bytes(self, first: int, parts: Sequence[pb.DeltaPart]) -> int:
        """Bytes of the elements that parts report as changed; a whole range without a report."""
        found = 0
        for index, part in enumerate(parts, first):
            item = self.items[index]
            if part.changed_count >= 0:
                found += part.changed_count * item.element_bytes
            elif part.digest != self.digests[index]:
                found += item.end_bytes - item.begin_bytes
        return found

    def apply(self, first: int, parts: Sequence[pb.DeltaPart], data: bytes) -> list[int]:
        """Apply the parts of the ranges from `first` on; return indexes of ranges to read whole."""
        whole: list[int] = []
        offset = 0
        for index, part in enumerate(parts, first):
            self.wanted[index] = part.digest
            end = offset + part.size_bytes
            if part.digest != self.digests[index]:
                known, self.digests[index] = self.digests[index], b""
                delta = Delta(part.form, part.changed_count, data[offset:end])
                if not known or not part.size_bytes or not self._changed(index, delta):
                    whole.append(index)
            offset = end
        return whole

    def check(self, index: int) -> bool:
        """Whether a range is what the rank has; notes it."""
        if xxh3_128_digest(self.view(index)) != self.wanted[index]:
            return False
        self.digests[index] = self.wanted[index]
        return True

    def _changed(self, index: int, delta: Delta) -> bool:
        try:
            apply_delta(self.view(index), delta, self.items[index].element_bytes)
        except DataLossError:
            return False
        return self.check(index)


class Mirrors:
    """Mirrors of all ranks of a plan. Use from one task at a time."""

    def __init__(self, transfer: Transfer, plan: ReadPlan) -> None:
        self._transfer = transfer
        self._plan = plan
        self._unseen = {number for number, one in enumerate(plan.tensors) if 0 in one.shape}
        self._mirrors: Mapping[int, RankMirror] = {
            read.rank: _mirror(plan, read) for read in plan.ranks
        }

    async def refresh(self, reading: Reading) -> Refreshed:
        """Bring all mirrors to the pinned step.

        Raises:
            DataLossError: If a range read whole does not match the rank's digest, else as
                `Transfer.read_parts`. Bytes that have come are kept for the next refresh.
        """
        # No read continues into the next refresh when another one fails.
        answers = await all_ended([self._ask(reading, one) for one in self._mirrors.values()])
        asked = dict(zip(self._mirrors, answers, strict=True))
        sent_bytes = sum(found[1] for found in asked.values())
        changed_bytes = sum(found[2] for found in asked.values())
        whole = {rank: asked[rank][0] for rank in self._mirrors if asked[rank][0]}
        sent_bytes += await self._read_whole(reading, whole)
        # Tensors without elements have no range, and are news once.
        changed, self._unseen = self._unseen, set()
        for mirror in self._mirrors.values():
            mirror.base = reading.pinned.state
            for index, landing in enumerate(mirror.read.landings):
                if mirror.shown[index] != mirror.digests[index]:
                    changed.add(landing.tensor)
            mirror.shown = list(mirror.digests)
        return Refreshed(tuple(sorted(changed)), sent_bytes, changed_bytes)

    async def land(self, plan: ReadPlan, targets: Mapping[int, Sequence[Place]]) -> None:
        """Fill the places, by rank, from the mirrors."""
        await self._transfer.land(
            [(self._mirrors[read.rank], targets[read.rank]) for read in plan.ranks]
        )

    def places(self, read: RankRead) -> list[Place]:
        """As `transfer.Landings`: the ranges themselves."""
        memory = self._mirrors[read.rank].memory
        return [
            Place(one.begin_bytes, one.end_bytes, memory.data_ptr() + one.begin_bytes)
            for one in read.landings
        ]

    async def _ask(self, reading: Reading, mirror: RankMirror) -> tuple[list[int], int, int]:
        """For one rank: the ranges to be read whole, the received bytes, the changed bytes."""
        sidecars, pinned = reading.sidecars, reading.pinned
        base, mirror.base = mirror.base, None
        whole: list[int] = []
        sent_bytes = changed_bytes = 0
        rank = mirror.read.rank
        for first in range(0, len(mirror.items), ITEMS_PER_CALL):
            items = mirror.items[first : first + ITEMS_PER_CALL]
            request = pb.DeltaSnapshotRequest(items=items, keep=True)
            if base is not None:
                request.base_step, request.base_edits = base.step, base.edits
                request.base_history = base.history
            head, data, received_bytes = await sidecars.delta(
                pinned.pins[rank], request, reading.deadline_s - time.monotonic()
            )
            said = StateName.of(head.header)
            if said != pinned.state or len(head.parts) != len(items):
                raise ConflictError(
                    f"{sidecars.who(rank)} reported {len(head.parts)} changes of {said}; expected "
                    f"{len(items)} of {pinned.state}"
                )
            sent_bytes += received_bytes
            changed_bytes += mirror.changed_bytes(first, head.parts)
            whole += await self._transfer.run(partial(mirror.apply, first, head.parts, data))
        return whole, sent_bytes, changed_bytes

    async def _read_whole(self, reading: Reading, whole: Mapping[int, Sequence[int]]) -> int:
        """Read these ranges of each rank into the mirrors; return the received bytes."""
        if not whole:
            return 0
        reads = tuple(
            replace(
                self._mirrors[rank].read,
                landings=tuple(self._mirrors[rank].read.landings[index] for index in indexes),
            )
            for rank, indexes in whole.items()
        )
        plan = ReadPlan(tensors=self._plan.tensors, ranks=reads)
        pinned = reading.pinned
        some = replace(pinned, pins={rank: pinned.pins[rank] for rank in whole})
        await self._transfer.read_parts(replace(reading, pinned=some), plan, self)
        for rank, indexes in whole.items():
            if not await self._transfer.run(partial(_all_right, self._mirrors[rank], indexes)):
                raise DataLossError(
                    f"{reading.sidecars.who(rank)} sent bytes of step {pinned.state.step} that do "
                    "not match its own digest of them; try again, and check the host's memory if "
                    "this persists"
                )
        return sum(one.size_bytes for read in reads for one in read.landings)


def _all_right(mirror: RankMirror, indexes: Sequence[int]) -> bool:
    wrong = [index for index in indexes if not mirror.check(index)]
    return not wrong


def _mirror(plan: ReadPlan, read: RankRead) -> RankMirror:
    from paramd.mesh.reading.assemble import allocate, torch_dtype

    items = tuple(
        pb.DeltaItem(
            begin_bytes=one.begin_bytes,
            end_bytes=one.end_bytes,
            element_bytes=min(item_bytes(plan.tensors[one.tensor].dtype), MAX_ELEMENT_BYTES),
        )
        for one in read.landings
    )
    return RankMirror(read, items, allocate((read.size_bytes,), torch_dtype("uint8")))


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowRequest(StreamRequest):
    """A subscription to parameters; see `AsyncMesh.follow`."""

    deltas: bool = False
    """Have the elements that changed sent, where that takes fewer bytes."""
    merge: bool = False
    """Merge an adapter into its base."""
    adapter: str = ""
    """The adapter's name; empty: the only one."""


class _Handed:
    """Tensors that a user has, returned again where they have not changed in the training.

    The user may write to them. A version counter would miss writes through `.data` or NumPy. So a
    digest of each is kept, and compared before it is returned again; it takes a sixth of the time
    of a copy into fresh memory, and no memory.
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
        """Tensors that the user has written to, apart from `changed`, which are read anyway."""
        numbers = [n for n in range(len(self._names)) if n not in changed]
        found = await self._digested([n for n in numbers if n in self._digests])
        return [n for n in numbers if n not in found or found[n] != self._digests[n]]

    async def _digested(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return await self._transfer.run(
            lambda: {number: _digest_of(self.tensors[self._names[number][0]]) for number in numbers}
        )


class _Merged:
    """Merged tensors, kept while what they are made of does not change."""

    def __init__(
        self,
        merger: Merger,
        plan: ReadPlan,
        names: Sequence[tuple[str, ...]],
        dtype: torch.dtype | None,
    ) -> None:
        """`names`: of each tensor of the plan, in memory."""
        self._merger = merger
        self._fqns = [one.fqn for one in plan.tensors]
        self._names = names
        self._dtype = dtype
        self._kept: dict[str, tuple[tuple[torch.Tensor, ...], torch.Tensor, bytes]] = {}
        """By fqn: what it was made of, the tensor that the user has, and its digest."""

    def made(
        self, tensors: Mapping[str, torch.Tensor], changed: Collection[int]
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The merged model's tensors by their names, and the names of those that changed.

        `tensors`: those in memory, by name; `changed`: indexes of the plan's that did.
        """
        by_fqn = {
            fqn: tensors[names[0]] for fqn, names in zip(self._fqns, self._names, strict=True)
        }
        news = {self._fqns[number] for number in changed}
        found: dict[str, torch.Tensor] = {}
        said: list[str] = []
        for fqn, names in zip(self._fqns, self._names, strict=True):
            own = self._merger.names(fqn, names)
            if not own:
                continue
            inputs = self._merger.inputs(fqn)
            found |= dict.fromkeys(own, self._one(fqn, inputs, by_fqn))
            if not news.isdisjoint((fqn, *inputs)):
                said += own
        return found, said

    def _one(
        self, fqn: str, inputs: Sequence[str], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        base = tensors[fqn]
        if not inputs and self._dtype in (None, base.dtype):
            return base
        sources = (base, *(tensors[name] for name in inputs))
        if fqn in self._kept:
            known, tensor, digest = self._kept[fqn]
            same = all(one is other for one, other in zip(known, sources, strict=True))
            # As in `_Handed`: the user may have written to it.
            if same and digest and _digest_of(tensor) == digest:
                return tensor
        tensor = base.clone()
        self._merger.merge_(fqn, tensor, tensors)
        if self._dtype is not None:
            tensor = tensor.to(self._dtype)
        self._kept[fqn] = sources, tensor, _digest_of(tensor)
        return tensor


def _digest_of(tensor: torch.Tensor) -> bytes:
    """Digest of bytes, shape and dtype; empty for a tensor that was moved or laid out otherwise."""
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
        merger: Merger | None = None,
    ) -> None:
        self._transfer = transfer
        # What is merged is cast afterwards.
        self._wanted = wanted if merger is None else replace(wanted, dtype=None)
        self._merged = _Merged(merger, plan, names, wanted.dtype) if merger is not None else None
        self._plan = plan
        self._names = names
        spans = spans_of(sidecars, plan)
        self._requests = {rank: sidecars.pin_request(of) for rank, of in spans.items()}
        self.ranks = tuple(self._requests)
        self._digests: list[tuple[bytes, ...]] = []
        self._handed = _Handed(transfer, names)
        self._due: set[int] = set()
        """Tensors that have changed since they were last given out."""
        self._mirrors = Mirrors(transfer, plan) if wanted.deltas else None

    async def hold(self, sidecars: Sidecars, at: At, timeout_s: float) -> PinnedStep:
        return await hold_step(sidecars, self._requests, at, timeout_s)

    def release(self, held: PinnedStep) -> None:
        held.release()

    async def read(self, sidecars: Sidecars, at: At, dropped: int, held: PinnedStep) -> ParamFrame:
        """The frame: changed tensors read, others kept, those that the user wrote to made again."""
        reading = held.reading(self._wanted.transport)
        if self._mirrors is not None:
            found = await self._mirrors.refresh(reading)
            self._due.update(found.changed)
            made = await self._to_make()
            await self._handed.take(made, await self._landed(self._mirrors, made))
            found = replace(found, changed=tuple(sorted(self._due)))
        else:
            found = await self._read_changed(reading)
        self._due.clear()
        tensors = {name: self._handed.tensors[name] for names in self._names for name in names}
        changed = [name for number in found.changed for name in self._names[number]]
        if self._merged is not None:
            merged = self._merged
            work = partial(merged.made, tensors, frozenset(found.changed))
            tensors, changed = await self._transfer.run(work)
        return ParamFrame(
            tensors,
            changed=changed,
            job=sidecars.document.job,
            incarnation=held.state.incarnation,
            history=at.history,
            step=at.step,
            dropped=dropped,
            replica=self._plan.replica,
            sent_bytes=found.sent_bytes,
            changed_bytes=found.changed_bytes if self._mirrors is not None else None,
        )

    async def _read_changed(self, reading: Reading) -> Refreshed:
        """Read the tensors whose digests changed, whole."""
        digests = await self._digested(reading)
        self._due.update(
            number
            for number, now in enumerate(digests)
            if not self._digests or now != self._digests[number]
        )
        self._digests = digests
        made = await self._to_make()
        chosen = Chosen(names=self._names, plan=self._plan, at_boundary=False)
        found = await self._transfer.tensors(reading, chosen, made, dtype=self._wanted.dtype)
        await self._handed.take(made, found)
        reads = self._plan.only(made).ranks
        sent_bytes = sum(one.size_bytes for read in reads for one in read.landings)
        return Refreshed(tuple(sorted(self._due)), sent_bytes, sent_bytes)

    async def _to_make(self) -> list[int]:
        """The tensors that training or the user has changed."""
        return sorted({*self._due, *await self._handed.spoiled(self._due)})

    async def _landed(self, mirrors: Mirrors, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """New tensors with these indexes, by name, made from the mirrors."""
        from paramd.mesh.reading.assemble import Targets

        if not numbers:
            return {}
        plan, names = self._plan.only(numbers), [self._names[number] for number in numbers]
        targets = Targets(plan, names, dtype=self._wanted.dtype, device=None, into=None)
        await mirrors.land(plan, {read.rank: targets.places(read) for read in plan.ranks})
        return targets.results()

    async def _digested(self, reading: Reading) -> list[tuple[bytes, ...]]:
        """Digests of each tensor's parts, ordered by rank and landing."""
        answers = await asyncio.gather(
            *(
                reading.digests(
                    read.rank, [(one.begin_bytes, one.end_bytes) for one in read.landings]
                )
                for read in self._plan.ranks
            )
        )
        parts: list[list[bytes]] = [[] for _ in self._plan.tensors]
        for read, digests in zip(self._plan.ranks, answers, strict=True):
            for landing, digest in zip(read.landings, digests, strict=True):
                parts[landing.tensor].append(digest)
        return [tuple(found) for found in parts]


def kept_bytes(plan: ReadPlan, wanted: FollowRequest) -> int:
    """Memory of a subscription's tensors, and with deltas of its copies of the ranks' snapshots."""
    from paramd.mesh.reading.assemble import torch_dtype

    dtypes = (wanted.dtype or torch_dtype(tensor.dtype) for tensor in plan.tensors)
    items = zip(plan.tensors, dtypes, strict=True)
    tensors_bytes = sum(math.prod(tensor.shape) * dtype.itemsize for tensor, dtype in items)
    return tensors_bytes + (plan.size_bytes if wanted.deltas else 0)


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
        merger = Merger(index, wanted.adapter) if wanted.merge else None
        patterns: Sequence[Pattern] = wanted.patterns
        if merger is not None:
            patterns = merger.with_inputs(patterns, buffers=False)
        selection = select(index, patterns, with_buffers=False)
        plan = plan_read(index.layout, selection, costs=reach.costs())
        names = [item.names for item in selection]
        # Before anything is pinned: what it keeps, for as long as it follows.
        check_client(kept_bytes(plan, wanted))
        return FollowSteps(sidecars, transfer, wanted, plan, names, merger)

    steps = await reach.attempts(attempt, time.monotonic() + READ_S)
    return StepStream(reach, steps, steps.read, every=wanted.every, parameters=True)
