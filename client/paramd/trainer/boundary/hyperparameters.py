"""Set hyper-parameters of a parameter group: one rank's part of an agreed edit.

The new values stand in the edit's note; the old ones take their place there, so that the same note
undoes it. Only numbers, and tuples of them, can be set: a switch such as `amsgrad` changes what
state there has to be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paramd.errors import ParamdError, UsageError
from paramd.memory.edit_note import Note, write_payload

NOT_NEGATIVE = frozenset({"lr", "eps", "weight_decay", "momentum", "initial_lr", "max_lr"})
BELOW_ONE = frozenset({"betas", "alpha", "dampening", "rho"})


class HyperparameterChange:
    """One change, from its note."""

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
        """What it touches of the edit memory."""
        return [(self._note.begin, self._note.begin + self._note.capacity)]

    def refusal(self) -> str:
        """Why it cannot be done; empty if it can."""
        try:
            _, group = self._found()
            for name, value in self._values.items():
                converted(name, value, group)
        except ParamdError as error:
            return str(error)
        return ""

    def apply(self, _token: int) -> str:
        """Set the values; return what its user has to know."""
        optimizer, group = self._found()
        new = {name: converted(name, value, group) for name, value in self._values.items()}
        old = {name: plain(group[name]) for name in new}
        write_payload(self._memory, self._note.begin, json.dumps(old).encode())
        for name, value in new.items():
            known = group[name]
            if isinstance(known, torch.Tensor):
                # In place: a scheduler or a captured graph may hold it.
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
    """`value` as the group has `name`.

    Raises:
        UsageError: the group has no such number, or cannot take this one.
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
