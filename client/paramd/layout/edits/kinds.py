"""The kinds of edit operations, in one table.

A new kind needs an entry here and in `paramd.v1.EditKind`, an argument of `mesh.edit` and an
option of `paramd edit`; REST, planning, programs and trainers read the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from paramd.layout.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from paramd.memory.edit_program import Record

WHOLE: Final = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
"""Dtypes that can be set and filled."""

BITS: Final = frozenset(d for d in ITEM_BYTES if "8_" in d) | {
    "uint16",
    "uint32",
    "uint64",
    "complex64",
}
"""Dtypes that can only be set, bit by bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """The numeric operands of all kinds, with their defaults."""

    value: float = 0.0
    """Operand of FILL, and of ADD and MUL without data."""
    weight: float = 1.0
    """Factor of ADD and LERP; never 0."""
    min: float = -math.inf
    """Lower bound of CLAMP."""
    max: float = math.inf
    """Upper bound of CLAMP."""


NUMBERS: Final[dict[str, float]] = asdict(Numbers())
"""Names and defaults of all numbers, in order."""


def numbers_of(of: Any) -> dict[str, Any]:
    """The operands of an operation, in any of its forms, by name."""
    return {"value": of.value, "weight": of.weight, "min": of.min, "max": of.max}


class EditKind(IntEnum):
    """The effect of an operation on its elements x; numbers as in `paramd.v1.EditKind`."""

    SET = 1
    ADD = 2
    MUL = 3
    LERP = 4
    FILL = 5
    CLAMP = 6

    @property
    def word(self) -> str:
        """The kind's name in Python, the CLI and REST."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The operands and the effect of a kind."""

    meaning: str
    apply: Callable[[torch.Tensor, Record, torch.Tensor | None], object]
    """Changes x in place; data has its shape and dtype. Run under `torch.no_grad`."""
    with_data: bool = False
    """The operand may be data."""
    without_data: bool = True
    """The operand may be numbers."""
    numbers: tuple[str, ...] = ()
    """The `NUMBERS` that it takes; `value` is the alternative to data."""
    needed: tuple[str, ...] = ()
    """The required ones."""
    others: frozenset[str] = frozenset()
    """Dtypes it supports besides the floating ones."""

    def taken(self, *, with_data: bool) -> list[str]:
        """Numbers that it takes, with data or without."""
        return [name for name in self.numbers if name != "value" or not with_data]

    @property
    def shown(self) -> tuple[str, ...]:
        """Numbers named in a short text: the weight only if there is no other."""
        return tuple(name for name in self.numbers if name != "weight") or self.numbers


def _add(x: torch.Tensor, op: Record, data: torch.Tensor | None) -> None:
    if data is not None:
        x.add_(data, alpha=op.weight)
    else:
        x.add_(op.weight * op.value)


def _operand(data: torch.Tensor | None) -> torch.Tensor:
    assert data is not None
    return data


KINDS: Final[dict[EditKind, Kind]] = {
    EditKind.SET: Kind(
        meaning="x = data",
        apply=lambda x, op, data: x.copy_(_operand(data)),
        with_data=True,
        without_data=False,
        others=WHOLE | BITS,
    ),
    EditKind.ADD: Kind(
        meaning="x = x + weight * (data or value)",
        apply=_add,
        with_data=True,
        numbers=("value", "weight"),
        needed=("value",),
    ),
    EditKind.MUL: Kind(
        meaning="x = x * (data or value)",
        apply=lambda x, op, data: x.mul_(data if data is not None else op.value),
        with_data=True,
        numbers=("value",),
        needed=("value",),
    ),
    EditKind.LERP: Kind(
        meaning="x = x + weight * (data - x)",
        apply=lambda x, op, data: x.lerp_(_operand(data), op.weight),
        with_data=True,
        without_data=False,
        numbers=("weight",),
        needed=("weight",),
    ),
    EditKind.FILL: Kind(
        meaning="x = value",
        apply=lambda x, op, data: x.fill_(op.value if x.is_floating_point() else int(op.value)),
        numbers=("value",),
        needed=("value",),
        others=WHOLE,
    ),
    EditKind.CLAMP: Kind(
        meaning="x = min(max(x, min), max)",
        apply=lambda x, op, data: x.clamp_(op.min, op.max),
        numbers=("min", "max"),
    ),
}

BY_WORD: Final = {kind.word: kind for kind in EditKind}


def words(chosen: Callable[[Kind], bool], form: str = "{}") -> str:
    """The words of the chosen kinds for a message, each formatted with `form`."""
    return ", ".join(form.format(kind.word) for kind, about in KINDS.items() if chosen(about))
