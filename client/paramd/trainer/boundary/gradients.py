"""Gradient capture: copy the gradients that an update consumes into the slot armed for it.

Each update reads two words and does nothing more if they name another update. It never waits
for a slot to be armed, unless the operator lets lossless readers hold up an update for a
bounded time (`lossless_budget_ms`). Nothing here communicates or waits for other ranks.

    capture   right before an optimizer reads gradients: after all pre-hooks of its step, and
              after its closure has computed them. Again for a second try of a step that raised,
              and for an optimizer that steps within the update, of its own parameters
    publish   the update is over: the frame has what was captured last

So a try that raised, and gradients that a hook, a closure or a wrapping optimizer has replaced
since, are never shown under the update's number.

A gradient has the geometry of its parameter's local memory: an element has the same offset in
both. So a piece is one memmove, unless the gradient's dtype, strides or placement differ from
its parameter's, or the parameter was replaced by one in other memory: then its elements are found
by their global indices.

Optimizers that step within the backward free some gradients before others exist: their
updates have no gradient frame, and readers learn that it was left out.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from paramd.layout.types import Box, Region, intersection
from paramd.memory.control_page import ControlPage, Word, in_time
from paramd.memory.descriptors import SparseMemory, wake
from paramd.memory.gradient_program import (
    GROUP_AXES_BIT,
    MAX_NOTES,
    NoFrame,
    NoGradient,
    Note,
    Notes,
    Slot,
    Spans,
    digest_of_spans,
    write_no_frame,
)
from paramd.memory.handover import GRADIENT_SLOTS
from paramd.trainer.boundary.signals import backward_id, members
from paramd.trainer.home.mirrored import finish_copies
from paramd.trainer.home.moving import address, extent
from paramd.trainer.model.dtensor import is_dtensor, leaf_of, split
from paramd.trainer.model.flatten import wait_for_gradient
from paramd.trainer.model.local_shard import LocalShard
from paramd.trainer.model.local_shard import Slot as Place
from paramd.trainer.model.plain import has_plain_memory

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Pieces = Sequence[tuple[LocalShard, int]]
"""Shards with elements, each with its first arena byte."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory gradients are copied into; arena byte x maps to its byte x."""

    buffer: memoryview
    address: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements of a piece, and their place in the memory of a parameter that was replaced."""

    at: tuple[slice, ...]
    """In the piece."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """First element in the parameter's local memory."""


@dataclass(frozen=True, slots=True)
class Part:
    """Wanted elements [begin, end) of one piece, counted in the piece's memory order."""

    shard: LocalShard
    arena_begin: int
    """The piece's first byte in the arena."""
    offset: int
    """First element of the piece in the parameter's local memory, where that is the arena's."""
    begin: int
    end: int
    cuts: tuple[Cut, ...] = ()
    """Where the elements are otherwise."""


@dataclass(slots=True)
class Source:
    """One parameter whose gradient is wanted, in whole or in part."""

    param: torch.Tensor
    local: torch.Tensor
    spec: DTensorSpec | None
    parts: list[Part] = field(default_factory=list)
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    """(arena byte, byte of the local memory, length) of each memmove."""

    def close(self) -> None:
        """Compute the moves once all parts are added, joining adjacent ones."""
        size = self.local.itemsize
        for part in self.parts:
            if part.cuts:
                continue
            move = (
                part.arena_begin + part.begin * size,
                (part.offset + part.begin) * size,
                (part.end - part.begin) * size,
            )
            if self.moves:
                to, at, length = self.moves[-1]
                if (to + length, at + length) == move[:2]:
                    self.moves[-1] = (to, at, length + move[2])
                    continue
            self.moves.append(move)


Found = Mapping[str, Sequence[LocalShard]]
"""The shards that the model has now, by name."""


def find_sources(
    pieces: Pieces, spans: Spans, owner: object, found: Found | None = None
) -> tuple[list[Source], list[Note]]:
    """The parameters to copy from when `owner` updates, and notes on the others.

    `spans`: wanted bytes of the arena, sorted, not overlapping. An `owner` that is no optimizer
    means all parameters. `found`: None if all parameters are in place. A parameter that was
    replaced gets its place in the arena at a later boundary.
    """
    params = _params_of(owner)
    sources: dict[int, Source] = {}
    notes: list[Note] = []
    shared = _shared_begins(pieces)
    for shard, begin in pieces:
        wanted = list(_wanted(shard, begin, spans))
        if not wanted:
            continue
        own = _leaf_in(_slot_now(shard, found))
        if own is None:
            notes.append(Note(begin, NoGradient.CHANGED))
            continue
        param = own if params is None else params.get(id(own), params.get(_pointer(own)))
        if param is None:
            why = NoGradient.OTHER_OPTIMIZER if own.requires_grad else NoGradient.FROZEN
            notes.append(Note(begin, why))
            continue
        if begin in shared:
            notes.append(Note(begin, NoGradient.UNSUPPORTED))
            continue
        if id(param) not in sources:
            local, spec = split(param)
            sources[id(param)] = Source(param, local.detach(), spec)
        source = sources[id(param)]
        offset = _offset(shard, source.local)
        cuts: tuple[Cut, ...] | None = ()
        if found is not None and (offset is None or not _is_home(shard, found[shard.fqn])):
            offset, cuts = 0, _cuts(shard, source.local, found[shard.fqn])
        if offset is None or cuts is None:
            notes.append(Note(begin, NoGradient.CHANGED))
            continue
        source.parts.extend(Part(shard, begin, offset, low, high, cuts) for low, high in wanted)
    for source in sources.values():
        source.close()
    return list(sources.values()), notes


def _slot_now(shard: LocalShard, found: Found | None) -> Place | None:
    if found is None:
        return shard.slot
    # A module that was replaced has a table of its own.
    shards = found.get(shard.fqn)
    return shards[0].slot if shards else None


def _leaf_in(slot: Place | None) -> torch.Tensor | None:
    """The tensor with the gradient of a slot; None if the slot has no tensor any more."""
    value = slot.owner.get(slot.key) if slot is not None else None
    return leaf_of(value) if isinstance(value, torch.Tensor) else None


def _offset(shard: LocalShard, local: torch.Tensor) -> int | None:
    """The piece's first element in its parameter's local memory; None: it is not there."""
    inner, outer = extent(shard.tensor), extent(local)
    if outer.begin <= inner.begin and inner.end <= outer.end:
        return (inner.begin - outer.begin) // shard.tensor.itemsize
    return None


def _is_home(shard: LocalShard, found: Sequence[LocalShard]) -> bool:
    """Whether the model has this piece where the arena has it, with the same strides."""
    own = extent(shard.tensor), shard.tensor.stride()
    return any(
        one.region == shard.region and (extent(one.tensor), one.tensor.stride()) == own
        for one in found
    )


def _cuts(
    shard: LocalShard, local: torch.Tensor, found: Sequence[LocalShard]
) -> tuple[Cut, ...] | None:
    """The place in `local` of each element of a piece; None: it does not have them all."""
    cuts: list[Cut] = []
    numel = 0
    for one in found:
        if (one.dtype, one.shape) != (shard.dtype, shard.shape):
            return None
        common = _common(shard.region, one.region)
        if common is None:
            continue
        first = _first_in(local, one)
        if first is None:
            return None
        corner, theirs, strides = _begin(shard.region), _begin(one.region), one.tensor.stride()
        steps = zip(common.begin, theirs, strides, strict=True)
        bounds = zip(common.begin, common.end, corner, strict=True)
        cuts.append(
            Cut(
                tuple(slice(begin - at, end - at) for begin, end, at in bounds),
                common.sizes,
                strides,
                first + sum((begin - at) * stride for begin, at, stride in steps),
            )
        )
        numel += common.numel
    return tuple(cuts) if numel == shard.region.numel else None


def _common(one: Region, other: Region) -> Box | None:
    if isinstance(one, Box) and isinstance(other, Box):
        return intersection(one, other)
    if isinstance(one, Box) or isinstance(other, Box):
        return None
    return intersection(Box((one.begin,), (one.end,)), Box((other.begin,), (other.end,)))


def _begin(region: Region) -> tuple[int, ...]:
    return region.begin if isinstance(region, Box) else (region.begin,)


def _first_in(local: torch.Tensor, shard: LocalShard) -> int | None:
    """The shard's first element in `local`, or in a tensor of the same form that stands for it."""
    inner, form = extent(shard.tensor), (local.dtype, local.shape, local.stride())
    for whole in (local, *shard.holders):
        outer = extent(whole)
        inside = outer.begin <= inner.begin and inner.end <= outer.end
        if inside and (whole.dtype, whole.shape, whole.stride()) == form:
            return (inner.begin - outer.begin) // local.itemsize
    return None


def _params_of(owner: object) -> dict[int, torch.Tensor] | None:
    """An optimizer's parameters by id, and by address for wrappers that recreate them."""
    groups = getattr(owner, "param_groups", None)
    if groups is None:
        return None
    params = [param for group in groups for param in group["params"]]
    return {_pointer(param): param for param in params} | {id(param): param for param in params}


def _shared_begins(pieces: Pieces) -> set[int]:
    """First bytes that different parameters share: each has a gradient, with room for only one."""
    seen: dict[int, torch.Tensor] = {}
    found: set[int] = set()
    for shard, begin in pieces:
        tensor = shard.slot.owner.get(shard.slot.key)
        if isinstance(tensor, torch.Tensor) and seen.setdefault(begin, tensor) is not tensor:
            found.add(begin)
    return found


def _pointer(param: torch.Tensor) -> int:
    return address(split(param)[0])


def _wanted(shard: LocalShard, begin: int, spans: Spans) -> Iterator[tuple[int, int]]:
    size, numel = shard.tensor.itemsize, shard.tensor.numel()
    end = begin + numel * size
    for low, high in spans:
        if low >= end:
            break
        first = -(-max(low - begin, 0) // size)
        last = min((high - begin) // size, numel)
        if first < last:
            yield first, last


def copy_gradient(source: Source, room: Room) -> list[Note]:
    """Copy the wanted parts of one gradient into the room; return notes about it.

    Waits only for collectives that the gradient itself depends on. The copy of a gradient on a
    device may still be in flight; `finish_copies` waits for it.
    """
    grad = source.param.grad
    if grad is None:
        wanted = source.param.requires_grad
        return _none(source, NoGradient.NONE if wanted else NoGradient.FROZEN)
    # Checked first: the common case, and the other checks cost more.
    if type(grad) is not torch.Tensor:
        if is_dtensor(grad):
            return _copy_dtensor(source, grad, room)
        grad = wait_for_gradient(grad)
    return _copy_local(source, grad, room, 0, 1)


def _copy_dtensor(source: Source, grad: Any, room: Room) -> list[Note]:
    local = wait_for_gradient(grad._local_tensor)
    spec = source.spec
    if spec is not None and grad._spec.placements == spec.placements:
        return _copy_local(source, local, room, 0, 1)
    if spec is None:
        whole = all(placement.is_replicate() for placement in grad._spec.placements)
        if not whole:
            return _none(source, NoGradient.PLACEMENT)
        return _copy_local(source, local, room, 0, 1)
    found = _compare(grad._spec, spec)
    if found is None:
        return _none(source, NoGradient.PLACEMENT)
    group, divisor, whole = found
    if whole:
        return _copy_slices(source, local, room)
    return _copy_local(source, local, room, group, divisor)


def _compare(grad: DTensorSpec, param: DTensorSpec) -> tuple[int, int, bool] | None:
    """(partial group, divisor of its sums, whether each rank has the whole), or None when this rank
    cannot tell which elements of the gradient are its own.
    """
    if grad.mesh != param.mesh:
        return None
    summed: list[int] = []
    divisor, sliced = 1, False
    for axis, (ours, theirs) in enumerate(zip(grad.placements, param.placements, strict=True)):
        if ours == theirs:
            continue
        if type(ours).__name__ == "Partial" and theirs.is_replicate():
            operation = getattr(ours, "reduce_op", "")
            if operation not in ("sum", "avg"):
                return None
            divisor *= grad.mesh.size(axis) if operation == "avg" else 1
            summed.append(axis)
        elif ours.is_replicate():
            sliced = True
        else:
            return None
    if sliced:
        whole = all(placement.is_replicate() for placement in grad.placements)
        return (0, 1, True) if whole else None
    coordinate = grad.mesh.get_coordinate()
    if coordinate is None:
        return None
    first = tuple(0 if axis in summed else at for axis, at in enumerate(coordinate))
    # With the axes: a sum over more of them is another group, though its first rank is the same.
    axes = sum(1 << axis for axis in summed)
    return (axes << GROUP_AXES_BIT) + 1 + int(grad.mesh.mesh[first]), divisor, False


def _copy_local(
    source: Source, grad: torch.Tensor, room: Room, group: int, divisor: int
) -> list[Note]:
    local = source.local
    if not has_plain_memory(grad) or not torch.can_cast(grad.dtype, local.dtype):
        return _none(source, NoGradient.UNSUPPORTED)
    if grad.shape != local.shape:
        changed = split(source.param)[0].shape != local.shape
        return _none(source, NoGradient.CHANGED if changed else NoGradient.UNSUPPORTED)
    grad = grad.detach()
    if grad.stride() != local.stride():
        strided = torch.empty_strided(local.shape, local.stride(), dtype=grad.dtype, device="cpu")
        grad = strided.copy_(grad)
    if grad.dtype is local.dtype and divisor == 1 and grad.device.type == "cpu":
        begin = address(grad)
        for to, at, length in source.moves:
            ctypes.memmove(room.address + to, begin + at, length)
    else:
        for part in source.parts:
            if part.cuts:
                continue
            numel = part.end - part.begin
            at = int(grad.storage_offset()) + part.offset + part.begin
            target, piece = _target(part, local.dtype, room), grad.as_strided((numel,), (1,), at)
            target.copy_(piece, non_blocking=divisor == 1)
            if divisor != 1:
                target.div_(divisor)
    for part in source.parts:
        if part.cuts:
            _copy_cuts(part, grad, room, divisor, local.dtype)
    return [] if group == 0 else [Note(begin, 0, group) for begin in begins(source)]


def _copy_slices(source: Source, whole: torch.Tensor, room: Room) -> list[Note]:
    """Cut each piece's box out of a gradient that is whole on every rank."""
    local = source.local
    if not has_plain_memory(whole) or not torch.can_cast(whole.dtype, local.dtype):
        return _none(source, NoGradient.UNSUPPORTED)
    for part in source.parts:
        box = part.shard.region
        if not isinstance(box, Box):
            return _none(source, NoGradient.PLACEMENT)
        cut = whole.detach()[tuple(slice(b, e) for b, e in zip(box.begin, box.end, strict=True))]
        piece = _empty_piece(part, local.dtype).copy_(cut)
        _put(part, piece, room)
    return []


def _copy_cuts(
    part: Part, grad: torch.Tensor, room: Room, divisor: int, dtype: torch.dtype
) -> None:
    """Copy a part of a parameter in other memory: the piece is put together as it is in the arena.

    `grad` has the sizes and strides of the parameter's local tensor.
    """
    piece, begin = _empty_piece(part, dtype), int(grad.storage_offset())
    for cut in part.cuts:
        piece[cut.at].copy_(grad.as_strided(cut.shape, cut.strides, begin + cut.offset))
    if divisor != 1:
        piece.div_(divisor)
    _put(part, piece, room)


def _empty_piece(part: Part, dtype: torch.dtype) -> torch.Tensor:
    shape, strides = part.shard.tensor.shape, part.shard.tensor.stride()
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def _put(part: Part, piece: torch.Tensor, room: Room) -> None:
    flat = piece.as_strided((piece.numel(),), (1,))
    _target(part, piece.dtype, room).copy_(flat[part.begin : part.end])


def _target(part: Part, dtype: torch.dtype, room: Room) -> torch.Tensor:
    begin_bytes, numel = part.arena_begin + part.begin * dtype.itemsize, part.end - part.begin
    return torch.frombuffer(room.buffer, dtype=dtype, count=numel, offset=begin_bytes)


def _none(source: Source, why: NoGradient) -> list[Note]:
    return [Note(begin, why) for begin in begins(source)]


def begins(source: Source) -> list[int]:
    return list(dict.fromkeys(part.arena_begin for part in source.parts))


log = logging.getLogger("paramd")

# Plain ints: these are read on every update.
_GRADIENTS_STEP = int(Word.GRADIENTS_STEP)
_ARM_SLOT0, _ARM_SLOT1 = int(Word.ARM_SLOT0), int(Word.ARM_SLOT1)
_REWOUND = int(Word.REWOUND)
_LOSSLESS_EVERY = int(Word.LOSSLESS_EVERY)

POLL_S = 50e-6
"""Poll interval in seconds while an update waits for a lossless reader."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to serve one version of a program for one owner."""

    version: int
    digest: int
    owner: object
    """Kept alive so that its id is not reused."""
    slots: list[Place | None]
    """Of each piece, when the plan was made."""
    served: list[torch.Tensor | None]
    """The tensor of each piece that has the gradient."""
    updated: list[torch.Tensor]
    """The owner's parameters."""
    sources: list[Source]
    notes: list[Note]
    devices: tuple[torch.device, ...]
    """Devices other than the host that hold gradients."""

    def holds(self, version: int, owner: object) -> bool:
        """Whether program, pieces and parameters are the same objects still.

        Parameters may be replaced by others of the same number, names and shapes.
        """
        if self.version != version:
            return False
        return _are(map(_leaf_in, self.slots), self.served) and _are(_listed(owner), self.updated)


def _by_name(shards: Sequence[LocalShard]) -> Found | None:
    found: dict[str, list[LocalShard]] = {}
    for shard in shards:
        found.setdefault(shard.fqn, []).append(shard)
    return found or None


def _listed(owner: object) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer's groups; none of any other owner."""
    for group in getattr(owner, "param_groups", ()):
        yield from group["params"]


def _are(found: Iterator[torch.Tensor | None], known: Sequence[torch.Tensor | None]) -> bool:
    return all(one is other for one, other in zip_longest(found, known))


@dataclass(slots=True)
class _Frame:
    """What a slot holds of the update in progress."""

    moment: int
    step: int
    told: Notes | None = None
    """None: there is nothing that could be shown."""
    why: NoFrame = NoFrame.LATE
    """Why there is nothing."""
    notes: dict[int, Note] = field(default_factory=dict)
    """By arena byte."""


class GradientCapture:
    """One rank's side of gradient frames. Called only on the thread that runs updates."""

    def __init__(
        self,
        page: ControlPage,
        wake_descriptor: int,
        descriptor: int,
        *,
        arena_bytes: int,
        pieces: Callable[[], Pieces],
        departed: Callable[[], Sequence[LocalShard]],
        lossless_budget_ns: int,
        partitioned: bool = False,
    ) -> None:
        """`descriptor` is the gradient memory's; `pieces` and `departed` are those of
        `ParameterStorage`, called once per plan. `partitioned`: an integration shows the gradients
        of its whole update, and the optimizers within step through its partitions.
        """
        self._words = page.words
        self._wake_descriptor = wake_descriptor
        self._pieces, self._departed = pieces, departed
        self._budget_ns = lossless_budget_ns
        self._partitioned = partitioned
        self._memory = SparseMemory(descriptor)
        self._slots: list[tuple[Slot, Room]] = []
        for index in range(GRADIENT_SLOTS if arena_bytes else 0):
            slot = Slot(self._memory.buffer, arena_bytes, index)
            begin, end = slot.begin_bytes, slot.tail_begin_bytes
            room = Room(self._memory.buffer[begin:end], self._memory.address + begin)
            self._slots.append((slot, room))
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._frames: dict[int, _Frame] = {}
        """Of the update in progress, by slot."""
        self._captured_at = 0
        self._from_within = False
        """Whether an optimizer within the update has shown what it consumes."""
        self._clip_factor = 0.0
        self._clipped_at = 0
        """Backward passes when the clip factor was noted."""
        self._tried_again = False
        self._failed = False
        self.iteration: Callable[[], int] = lambda: -1
        """Backward passes this rank has seen."""

    def clipped(self, factor: float) -> None:
        """Note that the next update's gradients were multiplied by `factor`."""
        self._clip_factor, self._clipped_at = factor, self.iteration()

    def retried(self) -> None:
        """The update in progress begins anew: its last try raised."""
        self._tried_again = True

    def capture(self, owner: object, step: int, *, within: bool = False) -> None:
        """Call right before `owner` consumes gradients in update `step`. Never raises; waits only
        for lossless readers.

        `owner` is the optimizer about to update; anything else means all parameters. `within`: it
        updates within another owner's update, and replaces what that one's capture has of its own
        parameters.
        """
        if within:
            if self._partitioned:
                return
            for index, frame in self._frames.items():
                self._add(index, frame, owner)
            self._from_within = True
            return
        words = self._words
        if self._frames:
            self._frames.clear()
        if not (words[_ARM_SLOT0] or words[_ARM_SLOT1] or self._budget_ns):
            return
        moment = in_time(step, rewound=words[_REWOUND])
        if self._budget_ns and words[_LOSSLESS_EVERY]:
            self._await_reader(step, moment)
        self._captured_at, self._from_within = self.iteration(), False
        if words[_ARM_SLOT0] == moment:
            self._begin(0, step, moment, owner)
        if words[_ARM_SLOT1] == moment:
            self._begin(1, step, moment, owner)

    def publish(self, step: int, owner: object) -> None:
        """Call when `owner`'s update, the first to be captured, is over as number `step`."""
        words = self._words
        if words[_ARM_SLOT0] or words[_ARM_SLOT1]:
            moment = in_time(step, rewound=words[_REWOUND])
            if words[_ARM_SLOT0] == moment:
                self._publish(0, moment, owner)
            if words[_ARM_SLOT1] == moment:
                self._publish(1, moment, owner)
        if self._frames:
            self._frames.clear()
        # After the DONE words: whoever reads this step finds that update's frames complete.
        words[_GRADIENTS_STEP] = step
        self._clip_factor, self._tried_again = 0.0, False

    def forget_plans(self) -> None:
        """Drop all references to parameters: some of them are about to move."""
        self._plans.clear()

    def close(self) -> None:
        for slot, _ in self._slots:
            slot.close()
        self._slots.clear()
        self._plans.clear()
        self._frames.clear()
        self._memory.close()

    def _begin(self, index: int, step: int, moment: int, owner: object) -> None:
        slot, _ = self._slots[index]
        # Given away already: the sidecar reads it.
        if self._words[slot.done_word] == moment:
            return
        frame = self._frames[index] = _Frame(moment, step)
        try:
            frame.why = _skips(owner)
            plan = self._plan(index, slot, owner) if not frame.why else None
            if plan is None:
                return
            scale, version, digest = _scale(owner), plan.version, plan.digest
            frame.told = Notes(step, version, scale, 0.0, (), self.iteration(), digest)
            frame.notes = {note.arena_begin: note for note in plan.notes}
            if members(owner):
                # It reads none itself: each of its members does, in a step of its own.
                why = NoGradient.OTHER_OPTIMIZER
                left = [begin for source in plan.sources for begin in begins(source)]
                frame.notes |= {begin: Note(begin, why) for begin in left}
            else:
                self._copy(index, frame, plan)
        except Exception:
            self._fail(frame)

    def _add(self, index: int, frame: _Frame, owner: object) -> None:
        told = frame.told
        if told is None:
            return
        try:
            frame.why = _skips(owner)
            plan = self._plan(index, self._slots[index][0], owner) if not frame.why else None
            # Of another program, what the first owner has captured would be missing.
            if plan is None or plan.version != told.version:
                frame.told = None
                return
            frame.told = replace(told, scale=_scale(owner))
            self._copy(index, frame, plan)
        except Exception:
            self._fail(frame)

    def _copy(self, index: int, frame: _Frame, plan: _Plan) -> None:
        _, room = self._slots[index]
        with torch.no_grad():
            for source in plan.sources:
                for begin in begins(source):
                    frame.notes.pop(begin, None)
                for note in copy_gradient(source, room):
                    frame.notes[note.arena_begin] = note
        finish_copies(plan.devices)

    def _fail(self, frame: _Frame) -> None:
        frame.told, frame.why = None, NoFrame.FAILED
        if not self._failed:
            log.exception("paramd: gradients could not be captured; training continues")
        self._failed = True

    def _publish(self, index: int, moment: int, owner: object) -> None:
        words, (slot, _) = self._words, self._slots[index]
        if words[slot.done_word] == moment:
            return
        frame = self._frames.get(index)
        if frame is not None and frame.moment != moment:
            # Another thread's update ended first, and has that number.
            frame = None
        if frame is not None and self._computed_inside(owner):
            self._add(index, frame, owner)
        # Also of a slot that was armed too late: its readers need not wait for a poll.
        if self._tell(slot, frame):
            words[slot.done_word] = moment
        else:
            write_no_frame(words, index, frame.why if frame is not None else NoFrame.LATE)
            words[slot.done_word] = -moment
        wake(self._wake_descriptor)

    def _computed_inside(self, owner: object) -> bool:
        """Whether hand-written code has computed the gradients after its update began."""
        by_hand = not isinstance(owner, torch.optim.Optimizer) and backward_id() == -1
        return by_hand and not self._from_within and self.iteration() != self._captured_at

    def _tell(self, slot: Slot, frame: _Frame | None) -> bool:
        if frame is None or frame.told is None:
            return False
        if len(frame.notes) > MAX_NOTES:
            frame.why = NoFrame.TOO_MANY
            return False
        notes = tuple(frame.notes.values())
        try:
            slot.write_notes(replace(frame.told, clip_factor=self._factor(), notes=notes))
        except Exception:
            # This runs within the optimizer's step, which a failure to inform readers must not end.
            self._fail(frame)
            return False
        return True

    def _factor(self) -> float:
        """The factor that these gradients were clipped by; 0 when unknown."""
        # Noted for a try that raised, and other gradients were computed since.
        if self._tried_again and self._clipped_at != self._captured_at:
            return 0.0
        return self._clip_factor

    def _plan(self, index: int, slot: Slot, owner: object) -> _Plan | None:
        known = self._plans.get((index, id(owner)))
        if known is not None and known.holds(slot.version(), owner):
            return known
        program = slot.read_program()
        if program is None:
            return None
        version, spans = program
        pieces, present = self._pieces(), _by_name(self._departed())
        sources, notes = find_sources(pieces, spans, owner, present)
        slots = [_slot_now(shard, present) for shard, _ in pieces]
        found = dict.fromkeys(source.local.device for source in sources)
        plan = _Plan(
            version,
            digest_of_spans(spans),
            owner,
            slots,
            [_leaf_in(slot) for slot in slots],
            list(_listed(owner)),
            sources,
            notes,
            tuple(device for device in found if device.type != "cpu"),
        )
        self._plans = {
            k: p for k, p in self._plans.items() if k[0] != index or p.version == version
        }
        self._plans[index, id(owner)] = plan
        return plan

    def _await_reader(self, step: int, moment: int) -> None:
        """Wait, within the budget, until a lossless reader has armed this step."""
        words = self._words
        if step % words[Word.LOSSLESS_EVERY]:
            return
        now_ns = time.monotonic_ns()
        end_ns = now_ns + self._budget_ns
        while (
            moment not in (words[Word.ARM_SLOT0], words[Word.ARM_SLOT1])
            and now_ns < end_ns
            and now_ns < words[Word.LOSSLESS_UNTIL_NS]
        ):
            time.sleep(POLL_S)
            now_ns = time.monotonic_ns()


def _skips(owner: object) -> NoFrame:
    """Why this update has no frame: skipped by a gradient scaler, or within a backward. LATE: it
    may have one.
    """
    if backward_id() != -1:
        return NoFrame.IN_BACKWARD
    found: Any = getattr(owner, "found_inf", None)
    skipped = isinstance(found, torch.Tensor) and bool(found.item())
    return NoFrame.SKIPPED if skipped else NoFrame.LATE


def _scale(owner: object) -> float:
    """The loss scale a fused optimizer still divides by; others get gradients unscaled."""
    scale: Any = getattr(owner, "grad_scale", None)
    return float(scale.item()) if isinstance(scale, torch.Tensor) else 1.0
