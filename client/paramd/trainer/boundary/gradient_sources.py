"""Where the gradients of pieces are, and how their bytes get into a slot's room.

A gradient has the geometry of its parameter's local memory: an element has the same offset in
both. So a piece is one memmove, unless the gradient's dtype, strides or placement differ from
its parameter's. Nothing here communicates or waits for other ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paramd.layout.types import Box
from paramd.memory.gradient_program import NoGradient, Note, Spans
from paramd.trainer.home.storages import address
from paramd.trainer.model.dtensor import is_dtensor, split
from paramd.trainer.model.flatten import wait_for_gradient
from paramd.trainer.model.local_shard import LocalShard
from paramd.trainer.model.plain import has_plain_memory

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Pieces = Sequence[tuple[LocalShard, int]]
"""Shards with elements, and the first byte of each in the arena."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory gradients are copied into; arena byte x maps to its byte x."""

    buffer: memoryview
    address: int

    def flat(self, dtype: torch.dtype, begin_bytes: int, numel: int) -> torch.Tensor:
        """Elements starting at an arena byte, 1-D."""
        return torch.frombuffer(self.buffer, dtype=dtype, count=numel, offset=begin_bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """Wanted elements [begin, end) of one piece, counted in the piece's memory order."""

    shard: LocalShard
    arena_begin: int
    """Of the piece."""
    offset: int
    """First element of the piece in the parameter's local memory."""
    begin: int
    end: int


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


def find_sources(pieces: Pieces, spans: Spans, owner: object) -> tuple[list[Source], list[Note]]:
    """The parameters to copy from when `owner` updates, and notes on the others.

    Args:
        pieces: this rank's parameters.
        spans: wanted bytes of the arena; sorted, not overlapping.
        owner: the optimizer; anything else means all parameters.
    """
    params = _params_of(owner)
    sources: dict[int, Source] = {}
    notes: list[Note] = []
    shared = _shared_begins(pieces)
    for shard, begin in pieces:
        wanted = list(_wanted(shard, begin, spans))
        if not wanted:
            continue
        own = leaf_of(shard.slot.tensor())
        param = own if params is None else params.get(id(own), params.get(_pointer(own)))
        if param is None:
            why = NoGradient.OTHER_OPTIMIZER if own.requires_grad else NoGradient.NONE
            notes.append(Note(begin, why))
            continue
        if begin in shared:
            notes.append(Note(begin, NoGradient.UNSUPPORTED))
            continue
        if id(param) not in sources:
            local, spec = split(param)
            sources[id(param)] = Source(param, local.detach(), spec)
        source = sources[id(param)]
        offset = (address(shard.tensor) - address(source.local)) // shard.tensor.itemsize
        source.parts.extend(Part(shard, begin, offset, low, high) for low, high in wanted)
    for source in sources.values():
        source.close()
    return list(sources.values()), notes


def _params_of(owner: object) -> dict[int, torch.Tensor] | None:
    """An optimizer's parameters by id, and by address for wrappers that recreate them."""
    groups = getattr(owner, "param_groups", None)
    if groups is None:
        return None
    params = [param for group in groups for param in group["params"]]
    return {_pointer(param): param for param in params} | {id(param): param for param in params}


def _shared_begins(pieces: Pieces) -> set[int]:
    """First bytes shared by parameters that are different tensors.

    Each has its own gradient, but there is room for only one.
    """
    seen: dict[int, torch.Tensor] = {}
    found: set[int] = set()
    for shard, begin in pieces:
        tensor = shard.slot.tensor()
        if seen.setdefault(begin, tensor) is not tensor:
            found.add(begin)
    return found


def leaf_of(param: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the gradient: torch's TP+DDP leaves a DTensor derived from it."""
    if param.is_leaf or param.grad_fn is None:
        return param
    (source, *_) = param.grad_fn.next_functions[0]
    leaf: torch.Tensor = getattr(source, "variable", param)
    return leaf


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
        return _none(source, NoGradient.NONE)
    group = 0
    # Checked first: the common case, and the other checks cost more.
    if type(grad) is not torch.Tensor:
        if is_dtensor(grad):
            return _copy_dtensor(source, grad, room)
        grad = wait_for_gradient(grad)
    return _copy_local(source, grad, room, group, 1)


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
    """(partial group, divisor of its sums, whether each rank has the whole).

    None when this rank cannot tell which elements of the gradient are its own.
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
    return 1 + int(grad.mesh.mesh[first]), divisor, False


def _copy_local(
    source: Source, grad: torch.Tensor, room: Room, group: int, divisor: int
) -> list[Note]:
    local = source.local
    if not has_plain_memory(grad) or not torch.can_cast(grad.dtype, local.dtype):
        return _none(source, NoGradient.UNSUPPORTED)
    if grad.shape != local.shape:
        return _none(source, NoGradient.UNSUPPORTED)
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
            numel = part.end - part.begin
            at = int(grad.storage_offset()) + part.offset + part.begin
            target, piece = _target(part, local.dtype, room), grad.as_strided((numel,), (1,), at)
            target.copy_(piece, non_blocking=divisor == 1)
            if divisor != 1:
                target.div_(divisor)
    if group == 0:
        return []
    return [Note(begin, 0, group) for begin in _begins(source)]


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
        shape, strides = part.shard.tensor.shape, part.shard.tensor.stride()
        piece = torch.empty_strided(shape, strides, dtype=local.dtype, device="cpu").copy_(cut)
        flat = piece.as_strided((piece.numel(),), (1,))
        _target(part, local.dtype, room).copy_(flat[part.begin : part.end])
    return []


def _target(part: Part, dtype: torch.dtype, room: Room) -> torch.Tensor:
    return room.flat(dtype, part.arena_begin + part.begin * dtype.itemsize, part.end - part.begin)


def _none(source: Source, why: NoGradient) -> list[Note]:
    return [Note(begin, why) for begin in _begins(source)]


def _begins(source: Source) -> list[int]:
    return list(dict.fromkeys(part.arena_begin for part in source.parts))
