"""A follower's copy of what it follows, byte for byte as the ranks have it, brought up by deltas.

Each rank's snapshot has a mirror here. A refresh asks the rank what changed since the step that the
mirror is of, changes the mirror in place, and compares every range with the digest that the rank
has of it. What does not match, or has no base at the rank any more, is read whole. The tensors that
users get are made from mirrors, so nothing that they do to one can spoil the next.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from paramd.deltas import Delta, apply_delta
from paramd.errors import ConflictError, DataLossError
from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import RankRead, ReadPlan
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.mesh.reading.places import Place
from paramd.mesh.reading.stream import Transport, memory_at
from paramd.mesh.reading.transfer import Transfer, all_ended
from paramd.state import StateName
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

ITEMS_PER_CALL = 20_000

MAX_ELEMENT_BYTES = 8
"""Larger elements are compared as several."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh found."""

    changed: tuple[int, ...]
    """Indexes of the plan's tensors that differ from what was shown last."""
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
    """Of each range; empty where it is unknown what is there."""
    wanted: list[bytes] = field(default_factory=list)
    """As the rank has them."""
    shown: list[bytes] = field(default_factory=list)
    """When tensors were last made of them."""
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
        """As `RandomAccess.read_into`."""
        ctypes.memmove(address, self.memory.data_ptr() + offset_bytes, size_bytes)

    def changed_bytes(self, first: int, parts: Sequence[pb.DeltaPart]) -> int:
        """Bytes of the elements that parts say have changed; a whole range where none is told."""
        found = 0
        for index, part in enumerate(parts, first):
            item = self.items[index]
            if part.changed_count >= 0:
                found += part.changed_count * item.element_bytes
            elif part.digest != self.digests[index]:
                found += item.end_bytes - item.begin_bytes
        return found

    def apply(self, first: int, parts: Sequence[pb.DeltaPart], data: bytes) -> list[int]:
        """Take in the parts of the ranges from `first` on; indexes of those to be read whole."""
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

    def __init__(self, transfer: Transfer, plan: ReadPlan, transport: Transport) -> None:
        self._transfer = transfer
        self._plan = plan
        self._transport = transport
        self._unseen = {number for number, one in enumerate(plan.tensors) if 0 in one.shape}
        self._mirrors: Mapping[int, RankMirror] = {
            read.rank: _mirror(plan, read) for read in plan.ranks
        }

    async def refresh(self, sidecars: Sidecars, pinned: Pinned, deadline_s: float) -> Refreshed:
        """Bring all mirrors to the pinned step.

        Raises:
            DataLossError: what was read whole does not match the rank's digest of it.
            ParamdError: as `Transfer.read_parts`. What has come is kept for the next refresh.
        """
        asked: dict[int, tuple[list[int], int, int]] = {}

        async def ask(rank: int, mirror: RankMirror) -> None:
            asked[rank] = await self._ask(sidecars, pinned, mirror, deadline_s)

        # None goes on into the next refresh when another one fails.
        await all_ended([ask(rank, mirror) for rank, mirror in self._mirrors.items()])
        sent_bytes = sum(found[1] for found in asked.values())
        changed_bytes = sum(found[2] for found in asked.values())
        whole = {rank: asked[rank][0] for rank in self._mirrors if asked[rank][0]}
        sent_bytes += await self._read_whole(sidecars, pinned, whole, deadline_s)
        # Tensors without elements have no range, and are news once.
        changed, self._unseen = self._unseen, set()
        for mirror in self._mirrors.values():
            mirror.base = pinned.state
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

    async def _ask(
        self, sidecars: Sidecars, pinned: Pinned, mirror: RankMirror, deadline_s: float
    ) -> tuple[list[int], int, int]:
        """Of one rank: the ranges to be read whole, the bytes that came, those that changed."""
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
                pinned.pins[rank], request, deadline_s - time.monotonic()
            )
            said = StateName.of(head.header)
            if said != pinned.state or len(head.parts) != len(items):
                raise ConflictError(
                    f"{sidecars.who(rank)} told of {len(head.parts)} changes of {said}; expected "
                    f"{len(items)} of {pinned.state}"
                )
            sent_bytes += received_bytes
            changed_bytes += mirror.changed_bytes(first, head.parts)
            whole += await self._transfer.run(partial(mirror.apply, first, head.parts, data))
        return whole, sent_bytes, changed_bytes

    async def _read_whole(
        self,
        sidecars: Sidecars,
        pinned: Pinned,
        whole: Mapping[int, Sequence[int]],
        deadline_s: float,
    ) -> int:
        """Read these ranges of each rank into the mirrors; the bytes that came."""
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
        some = replace(pinned, pins={rank: pinned.pins[rank] for rank in whole})
        await self._transfer.read_parts(sidecars, plan, some, self, self._transport, deadline_s)
        for rank, indexes in whole.items():
            right = await self._transfer.run(partial(_all_right, self._mirrors[rank], indexes))
            if not right:
                raise DataLossError(
                    f"{sidecars.who(rank)} sent bytes of step {pinned.step} that do not match its "
                    "own digest of them; try again, and check the host's memory if this persists"
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
