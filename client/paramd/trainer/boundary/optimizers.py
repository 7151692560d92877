"""The optimizer part of edits: finding and zeroing state, setting hyper-parameters.

An optimizer knows whole parameters, flat ones (FSDP1) or views of those; a piece of the arena is
matched to whichever contains it. State tensors of the local shape (`exp_avg`, momentum buffers,
also as DTensors) correspond to the parameter element by element.

The edit's note has the new hyper-parameters; the old ones replace them there, so that the same note
undoes the change. Only numbers, and tuples of them, can be set: a switch such as `amsgrad` changes
which state must exist.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paramd.errors import ParamdError, UsageError
from paramd.memory.edit_program import Note, Record, write_payload
from paramd.trainer.home.moving import Range, extent
from paramd.trainer.model import partitions
from paramd.trainer.model.dtensor import split

NOT_NEGATIVE = frozenset({"lr", "eps", "weight_decay", "momentum", "initial_lr", "max_lr"})
BELOW_ONE = frozenset({"betas", "alpha", "dampening", "rho"})


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
        """The optimizer's current state of the parameter; empty before the first step."""
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

    `locate` maps a parameter's memory to its arena byte when mirrored (home/mirrored.py).
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
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            yield number, param
    yield from partitions.unlisted(optimizer)


def owner_of(owned: Sequence[Owned], record: Record) -> Owned | None:
    """The parameter that contains a record's view; None when no optimizer has it."""
    index = bisect_right(owned, record.arena_begin, key=lambda one: one.begin)
    # Usually the nearest; columns of one tensor interleave, so the search continues.
    for one in reversed(owned[:index]):
        if record.arena_end <= one.end and _has_element(one, record):
            return one
    return None


def _has_element(owner: Owned, record: Record) -> bool:
    rest = (record.arena_begin - owner.begin) // record.itemsize
    dims = zip(owner.local.stride(), owner.local.shape, strict=True)
    for stride, size in sorted(dims, reverse=True):
        if stride and size > 1:
            rest -= min(rest // stride, size - 1) * stride
    return rest == 0


def zero_moments(owner: Owned, record: Record) -> None:
    """Zero the state of exactly the elements the record changes."""
    offset = (record.arena_begin - owner.begin) // record.itemsize
    for _key, moment in owner.moments():
        if moment.stride() == owner.local.stride():
            begin = moment.storage_offset() + offset
            moment.as_strided(record.sizes, record.strides, begin).zero_()
        else:
            moment.masked_fill_(_mask(owner.local, record, offset).to(moment.device), 0)


def _mask(local: torch.Tensor, record: Record, offset: int) -> torch.Tensor:
    """A mask of the record's elements, in the parameter's shape."""
    span = extent(local)
    memory = torch.zeros((span.end - span.begin) // local.itemsize, dtype=torch.bool, device="cpu")
    memory.as_strided(record.sizes, record.strides, offset).fill_(True)
    return memory.as_strided(local.shape, local.stride(), 0)


class HyperparameterChange:
    exact = False

    def __init__(
        self,
        note: Note,
        memory: memoryview,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        applied: Callable[[], None],
    ) -> None:
        """`applied` is called when values have changed, within the edit."""
        self._note = note
        self._memory = memory
        self._optimizers = optimizers
        self._applied = applied
        self._values: dict[str, Any] = json.loads(note.payload)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(self._note.begin, self._note.begin + self._note.capacity)]

    def refusal(self) -> str:
        try:
            _, group = self._found()
            for name, value in self._values.items():
                converted(name, value, group)
        except ParamdError as error:
            return str(error)
        return ""

    def apply(self, _token: int) -> str:
        """Set the values; return remarks for the user."""
        optimizer, group = self._found()
        new = {name: converted(name, value, group) for name, value in self._values.items()}
        old = {name: plain(group[name]) for name in new}
        write_payload(self._memory, self._note.begin, json.dumps(old).encode())
        for name, value in new.items():
            known = group[name]
            if isinstance(known, torch.Tensor):
                # In place: a scheduler or a captured graph may refer to it.
                with torch.no_grad():
                    known.fill_(value)
            else:
                group[name] = value
        self._applied()
        if "lr" in new and (
            "initial_lr" in group or hasattr(optimizer.step, "_wrapped_by_lr_sched")
        ):
            return "a scheduler sets lr too, and overwrites it at its next step"
        return ""

    def _found(self) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        optimizers = self._optimizers()
        number, index, *_ = self._note.numbers
        if not 0 <= number < len(optimizers):
            raise UsageError(
                f"there is no optimizer {number}; this training has "
                + ", ".join(f"{i} ({type(one).__name__})" for i, one in enumerate(optimizers))
            )
        groups = optimizers[number].param_groups
        if not 0 <= index < len(groups):
            raise UsageError(
                f"there is no group {index}; optimizer {number} "
                f"({type(optimizers[number]).__name__}) has groups 0 to {len(groups) - 1}"
            )
        return optimizers[number], groups[index]


def converted(name: str, value: Any, group: dict[str, Any]) -> Any:
    """`value` in the group's type of `name`; UsageError if the group has no such number or cannot
    take this one.
    """
    settable = [key for key in group if key != "params" and _numbers(group[key]) is not None]
    if name not in group or name == "params":
        raise UsageError(f"the group has no {name!r}; it has {', '.join(settable)}")
    known = _numbers(group[name])
    if known is None:
        raise UsageError(
            f"{name} is {group[name]!r}, a switch that is fixed while training runs; what can be "
            f"set is {', '.join(settable)}"
        )
    wanted = value if isinstance(value, list) else [value]
    several = isinstance(group[name], tuple | list)
    if isinstance(value, list) != several or len(wanted) != len(known):
        shape = f"{len(known)} numbers" if several else "a number"
        raise UsageError(f"{name}: {value!r}; expected {shape}, as in {plain(group[name])!r}")
    for one in wanted:
        _check(name, one, whole=all(isinstance(number, int) for number in known))
    if several:
        return type(group[name])(wanted)
    return float(value) if isinstance(known[0], float) else value


def plain(value: Any) -> Any:
    """A hyper-parameter as JSON."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def _check(name: str, value: Any, *, whole: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name}: {value!r}; expected a finite number")
    if name in NOT_NEGATIVE and value < 0:
        raise UsageError(f"{name}: {value}; expected 0 or more")
    if name in BELOW_ONE and not 0 <= value < 1:
        raise UsageError(f"{name}: {value}; expected 0 or more, and below 1")
    if whole and name not in NOT_NEGATIVE | BELOW_ONE and not float(value).is_integer():
        raise UsageError(f"{name}: {value}; expected a whole number")


def _numbers(value: Any) -> list[int | float] | None:
    """The numbers of a hyper-parameter; None if it is something else."""
    if isinstance(value, torch.Tensor):
        return [float(value)] if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        parts = [_numbers(one) for one in value]
        return [part[0] for part in parts if part] if parts and all(parts) else None
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else None
