"""Optimizer state: finding it for parameters in the arena, and mirroring it at agreed boundaries.

An optimizer knows whole parameters, flat ones (FSDP1) or views of those; a piece of the arena is
matched to whichever contains it. State tensors of the local shape (`exp_avg`, momentum buffers,
also as DTensors) correspond to the parameter element by element.

The moments memory is 8 rooms shaped like the arena (each rounded up to whole pages), then a table
of 1 MiB. Room i holds the state of one key, such as `exp_avg`: the state of the element at
arena byte x is at byte x of the room, with the piece's own strides. State whose itemsize
differs from the parameter's has no such place and is left out.

    table    length of what follows, int64; then zlib-compressed UTF-8 JSON:
    {"step": 7,
     "keys": ["exp_avg", "exp_avg_sq"],            room i has keys[i]
     "params": [{"begin": 0, "end": 4096,          bytes of the arena, of all its elements
                 "dtypes": {"exp_avg": "float32"}, its keys that have a room
                 "scalars": {"step": 7.0},         state that is one number
                 "left_out": {"x": "reason"},      state that is neither
                 "optimizer": 0, "group": 0}],     ordered by first byte
     "groups": [[{"lr": 0.001, "betas": [0.9, 0.999]}]],   by optimizer and group
     "failure": ""}                                 why nothing was mirrored, else empty

A parameter of the table is the optimizer's: an FSDP1 flat parameter holds several pieces of
the layout. Numbers JSON lacks (NaN, infinities) become the strings "nan", "inf" and "-inf".
The word MOMENTS_STEP is -1 while the trainer writes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paramd.errors import ParamdError
from paramd.memory.arena import HostArena
from paramd.memory.control_page import ControlPage, Word
from paramd.memory.descriptors import SparseMemory, pages
from paramd.memory.edit_program import Record
from paramd.memory.handover import MOMENT_ROOMS
from paramd.memory.moments_table import write_table
from paramd.tensors.edit_ops import Views
from paramd.trainer.home.device import DeviceMemory
from paramd.trainer.home.mirrored import MirroredHome
from paramd.trainer.home.moving import Range, extent
from paramd.trainer.model import partitions
from paramd.trainer.model.dtensor import split
from paramd.trainer.model.local_shard import dtype_name


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


class Moments:
    """One rank's optimizer state, as readers get it. Training thread only."""

    def __init__(
        self,
        page: ControlPage,
        arena: HostArena | DeviceMemory,
        memory: SparseMemory,
        *,
        mirror: MirroredHome | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            mirror: holds the parameters when they do not live in the arena.
            finish: waits until a device has done what training queued.
        """
        self._finish = finish
        self._words = page.words
        self._arena = arena
        self._memory = memory
        self._mirror = mirror
        self._views = Views(memory.buffer)
        self._room_bytes = pages(arena.size_bytes)
        self.optimizers: Collection[torch.optim.Optimizer] = ()

    def mirror(self) -> None:
        """Copy the optimizers' current state. The sidecar frees the memory afterwards.

        Costs the trainer one copy of its optimizer state, plus page faults the first time.
        The table records what could not be copied; raises only if the table cannot be written.
        """
        table: dict[str, Any] = {"step": self._words[Word.STEP], "keys": [], "failure": ""}
        self._finish()
        try:
            table.update(self._copied())
        except ParamdError as error:
            table.update(keys=[], params=[], groups=[], failure=str(error))
        write_table(self._memory, self._arena.size_bytes, table)

    def close(self) -> None:
        self._views = Views(memoryview(b""))
        self._memory.close()

    def _copied(self) -> dict[str, Any]:
        locate = self._mirror.locator() if self._mirror is not None else None
        owned = find_owned(self.optimizers, self._arena.address, self._arena.size_bytes, locate)
        keys = list(dict.fromkeys(key for one in owned for key, _ in one.moments()))
        kept = keys[:MOMENT_ROOMS]
        self._memory.reserve(0, len(kept) * self._room_bytes)
        numbers = {id(optimizer): i for i, optimizer in enumerate(self.optimizers)}
        with torch.no_grad():
            params = [self._copy(one, kept, numbers[id(one.optimizer)]) for one in owned]
        groups = [
            [
                {name: _plain(value) for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]
        return {"keys": kept, "params": params, "groups": groups}

    def _copy(self, one: Owned, keys: Sequence[str], optimizer: int) -> dict[str, Any]:
        dtypes: dict[str, str] = {}
        scalars: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        moments = dict(one.moments())
        for key, value in one.state().items():
            moment = moments.get(key)
            if moment is None:
                number = _number(value)
                if number is not None:
                    scalars[key] = number
                elif value is not None:
                    left_out[key] = "it does not have the parameter's local shape"
            elif key not in keys:
                left_out[key] = f"only {MOMENT_ROOMS} kinds of state are mirrored"
            elif moment.itemsize != one.local.itemsize:
                left_out[key] = f"it is {dtype_name(moment.dtype)}, of another size"
            else:
                dtypes[key] = dtype_name(moment.dtype)
                begin = keys.index(key) * self._room_bytes + one.begin
                shape, strides = tuple(one.local.shape), tuple(one.local.stride())
                self._views.at(dtypes[key], begin, shape, strides).copy_(moment)
        return {
            "begin": one.begin,
            "end": one.end,
            "dtypes": dtypes,
            "scalars": scalars,
            "left_out": left_out,
            "optimizer": optimizer,
            "group": one.group,
        }


def _number(value: Any) -> float | str | None:
    if isinstance(value, torch.Tensor):
        local, _ = split(value)
        if local.numel() != 1:
            return None
        value = local.item()
    if isinstance(value, bool | int | float):
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)
    return None


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON; as its repr where JSON has no such value."""
    number = _number(value)
    if number is not None or value is None or isinstance(value, str):
        return number if number is not None else value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)
