"""Optimizer state of parameters in the arena: finding it, and zeroing it.

An optimizer knows whole parameters, flat ones (FSDP1) or views of those; a piece of the arena is
matched to whichever contains it. State tensors of the local shape (`exp_avg`, momentum buffers,
also as DTensors) correspond to the parameter element by element.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paramd.memory.edit_program import Record
from paramd.trainer.home.moving import Range, extent
from paramd.trainer.model import partitions
from paramd.trainer.model.dtensor import split


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """An optimizer's parameter in the arena."""

    begin: int
    """First byte in the arena."""
    end: int
    param: torch.Tensor
    """The key of the optimizer's state."""
    local: torch.Tensor
    optimizer: torch.optim.Optimizer
    group: int
    """Index in param_groups."""

    def state(self) -> dict[str, Any]:
        """Its current state; empty before the first step."""
        found = self.optimizer.state.get(self.param)
        return found if isinstance(found, dict) else {}

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Local state tensors with one element per element of the parameter."""
        for key, value in self.state().items():
            # For a 0-dim parameter, the step count has the shape of a moment.
            if isinstance(value, torch.Tensor) and (self.local.ndim or key != "step"):
                local, _ = split(value)
                if local.shape == self.local.shape and local.device.type != "meta":
                    yield key, local.detach()


def find_owned(
    optimizers: Collection[torch.optim.Optimizer],
    arena_address: int,
    arena_bytes: int,
    locate: Callable[[Range], int | None] | None = None,
) -> list[Owned]:
    """The optimizers' parameters in the arena, ordered by first byte, each once.

    Args:
        arena_address: where it is mapped.
        arena_bytes: its size.
        locate: maps a parameter's memory to its arena byte when mirrored (home/mirrored.py).
    """
    found: dict[int, Owned] = {}
    for optimizer in optimizers:
        for number, param in _params_of(optimizer):
            local = split(param)[0].detach()
            span = extent(local)
            begin = locate(span) if locate is not None else span.begin - arena_address
            if begin is None:
                continue
            end = begin + span.end - span.begin
            if 0 <= begin < end <= arena_bytes:
                found[begin] = Owned(begin, end, param, local, optimizer, number)
    return [found[begin] for begin in sorted(found)]


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """Its parameters, each with the index of its group."""
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            yield number, param
    yield from partitions.unlisted(optimizer)


def owner_of(owned: Sequence[Owned], record: Record) -> Owned | None:
    """The parameter that contains a record's view; None when no optimizer has it."""
    index = bisect_right(owned, record.arena_begin, key=lambda one: one.begin)
    # Usually the nearest; columns of one tensor interleave, so the search goes on.
    for one in reversed(owned[:index]):
        if record.arena_end <= one.end and _has_element(one, record):
            return one
    return None


def _has_element(owner: Owned, record: Record) -> bool:
    """Whether the record's first element belongs to the parameter."""
    rest = (record.arena_begin - owner.begin) // record.itemsize
    dims = zip(owner.local.stride(), owner.local.shape, strict=True)
    for stride, size in sorted(dims, reverse=True):
        if stride and size > 1:
            index = min(rest // stride, size - 1)
            rest -= index * stride
    return rest == 0


def zero_moments(owner: Owned, record: Record) -> None:
    """Zero the state of exactly the elements the record changes."""
    offset = (record.arena_begin - owner.begin) // record.itemsize
    for _key, moment in owner.moments():
        if moment.stride() == owner.local.stride():
            begin = moment.storage_offset() + offset
            moment.as_strided(record.sizes, record.strides, begin).zero_()
        else:
            mask = _mask(owner.local, record, offset)
            moment.masked_fill_(mask.to(moment.device), 0)


def _mask(local: torch.Tensor, record: Record, offset: int) -> torch.Tensor:
    """A mask of the record's elements, in the parameter's shape."""
    span = extent(local)
    numel = (span.end - span.begin) // local.itemsize
    memory = torch.zeros(numel, dtype=torch.bool, device="cpu")
    memory.as_strided(record.sizes, record.strides, offset).fill_(True)
    return memory.as_strided(local.shape, local.stride(), 0)
