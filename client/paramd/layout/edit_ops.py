"""What an edit does to a parameter: kinds, operands, and which dtype can take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from paramd.errors import UsageError
from paramd.layout.dtypes import ITEM_BYTES
from paramd.layout.types import Box


class EditKind(IntEnum):
    """What an operation does with the elements x it names; numbers as in `paramd.v1.EditKind`."""

    SET = 1
    """x = data"""
    ADD = 2
    """x = x + weight * (data or value)"""
    MUL = 3
    """x = x * (data or value)"""
    LERP = 4
    """x = x + weight * (data - x)"""
    FILL = 5
    """x = value"""
    CLAMP = 6
    """x = min(max(x, min), max)"""

    @property
    def word(self) -> str:
        """As users write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOp:
    """Changes one region of one parameter; as `paramd.v1.EditOp`."""

    fqn: str
    """Name of the parameter."""
    box: Box | None = None
    """The region; None is the whole parameter."""
    kind: EditKind
    value: float = 0.0
    """Operand of FILL, and of ADD and MUL without data."""
    weight: float = 1.0
    """Factor of ADD and LERP; never 0."""
    min: float = -math.inf
    """Lower bound of CLAMP."""
    max: float = math.inf
    """Upper bound of CLAMP."""
    with_data: bool = False
    """The operand comes as data of the region's shape, in the parameter's dtype."""


_DATA: dict[EditKind, tuple[bool, ...]] = {
    EditKind.SET: (True,),
    EditKind.ADD: (True, False),
    EditKind.MUL: (True, False),
    EditKind.LERP: (True,),
    EditKind.FILL: (False,),
    EditKind.CLAMP: (False,),
}
"""Whether each kind takes its operand as data, as a number, or as either."""

FLOAT_MAX: dict[str, float] = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
}
"""Largest finite number of each dtype that edits compute with."""

_WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
"""Dtypes that can be set and filled."""

_BITS = frozenset(d for d in ITEM_BYTES if "8_" in d) | {"uint16", "uint32", "uint64", "complex64"}
"""Dtypes whose elements are set as they are, and nothing else."""


def check_op(op: EditOp, dtype: str, *, allow_nonfinite: bool = False) -> None:
    """Returns when a parameter of `dtype` can take the operation.

    Raises:
        UsageError: it cannot, or an operand is missing or out of range.
    """
    where = f"{op.kind.word} of {op.fqn!r}"
    if op.with_data not in _DATA[op.kind]:
        raise UsageError(
            f"{where}: needs data of the region's shape; set with_data and send it"
            if not op.with_data
            else f"{where}: takes numbers, not data; use set, add, mul or lerp with data"
        )
    _check_dtype(op, dtype, where)
    if op.kind is EditKind.CLAMP:
        _check_clamp(op, where)
    for name, number in _numbers(op).items():
        _check_number(name, number, dtype, where, allow_nonfinite=allow_nonfinite)


def _numbers(op: EditOp) -> dict[str, float]:
    """The numbers that the operation uses, but bounds that bound nothing."""
    numbers: dict[str, float] = {}
    if op.kind is EditKind.FILL or (op.kind in (EditKind.ADD, EditKind.MUL) and not op.with_data):
        numbers["value"] = op.value
    if op.kind in (EditKind.ADD, EditKind.LERP):
        numbers["weight"] = op.weight
    if op.kind is EditKind.CLAMP:
        numbers |= {"min": op.min} if op.min != -math.inf else {}
        numbers |= {"max": op.max} if op.max != math.inf else {}
    return numbers


def _check_dtype(op: EditOp, dtype: str, where: str) -> None:
    if dtype in FLOAT_MAX:
        return
    if dtype not in _WHOLE and dtype not in _BITS:
        raise UsageError(f"{where}: dtype {dtype} cannot be edited")
    if op.kind is EditKind.FILL and dtype in _WHOLE:
        return
    if op.kind is not EditKind.SET:
        instead = "set or fill" if dtype in _WHOLE else "set"
        raise UsageError(f"{where}: dtype {dtype} is not computed with; use {instead}")


def _check_clamp(op: EditOp, where: str) -> None:
    if not op.min <= op.max or (op.min, op.max) == (-math.inf, math.inf):
        raise UsageError(
            f"{where}: min {op.min} and max {op.max}; expected at least one bound, and min not "
            "above max"
        )


def _check_number(
    name: str, number: float, dtype: str, where: str, *, allow_nonfinite: bool
) -> None:
    if name == "weight" and number == 0:
        raise UsageError(f"{where}: weight 0 changes nothing; 1 adds the operand as it is")
    if dtype in FLOAT_MAX:
        if allow_nonfinite and name == "value":
            return
        if not math.isfinite(number) or abs(number) > FLOAT_MAX[dtype]:
            raise UsageError(
                f"{where}: {name} is {number}, which {dtype} cannot hold as a finite number; "
                "an admin may allow that with allow_nonfinite"
            )
        return
    low, high = _integer_range(dtype)
    if not math.isfinite(number) or number != int(number) or not low <= int(number) <= high:
        raise UsageError(
            f"{where}: {name} is {number}; expected a whole number from {low} to {high}, for "
            f"its dtype is {dtype}"
        )


def _integer_range(dtype: str) -> tuple[int, int]:
    if dtype == "bool":
        return 0, 1
    bits = 8 * ITEM_BYTES[dtype]
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
