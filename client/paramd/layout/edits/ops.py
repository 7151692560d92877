"""What an edit does to a parameter: kinds, operands, and which dtype can take them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import xxhash

from paramd.errors import NotFoundError, UsageError
from paramd.layout.dtypes import ITEM_BYTES
from paramd.layout.regions import full_box
from paramd.layout.select import NameIndex, Selection, select
from paramd.layout.slices import split_slices
from paramd.layout.types import Box
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

Number = float | int
Operand = "Number | torch.Tensor | Mapping[str, torch.Tensor]"

_FORMS = "fill=, add=, mul=, set=, lerp= or clamp="

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation on what a pattern matches."""

    pattern: str
    op: str
    """set, add, mul, lerp, fill or clamp."""
    value: float | None = None
    weight: float | None = None
    min: float | None = None
    max: float | None = None
    operand: torch.Tensor | None = None
    """Shaped like the one region that the pattern matches."""

    def document(self) -> dict[str, Any]:
        """As the REST side takes it; the operand travels to the sidecars."""
        found: dict[str, Any] = {"pattern": self.pattern, "op": self.op}
        for name in ("value", "weight", "min", "max"):
            number = getattr(self, name)
            if number is not None:
                found[name] = number if math.isfinite(number) else str(number)
        if self.operand is not None:
            found["data"] = True
        return found


def ops_of(
    patterns: Sequence[str],
    *,
    fill: Number | None = None,
    add: Any = None,
    mul: Any = None,
    set: Any = None,
    lerp: Any = None,
    weight: Number | None = None,
    clamp: tuple[Number | None, Number | None] | None = None,
) -> list[Op]:
    """The operations that one call of `mesh.edit` means.

    Raises:
        UsageError: not exactly one form, or its operand does not suit it.
    """
    forms = {"fill": fill, "add": add, "mul": mul, "set": set, "lerp": lerp, "clamp": clamp}
    given = {name: operand for name, operand in forms.items() if operand is not None}
    if len(given) != 1:
        found = ", ".join(f"{name}=" for name in given) or "none"
        raise UsageError(f"edit: expected exactly one of {_FORMS} (given: {found})")
    ((kind, operand),) = given.items()
    if weight is not None and kind not in ("add", "lerp"):
        raise UsageError(f"weight: only add= and lerp= have one, not {kind}=")
    if isinstance(operand, Mapping):
        if patterns:
            raise UsageError(
                f"edit: {kind}= is given by name, so no pattern may be given ({patterns[0]!r})"
            )
        return [_op(name, kind, tensor, _weight(kind, weight)) for name, tensor in operand.items()]
    if not patterns:
        raise UsageError("edit: no pattern was given; expected at least one, '*' means all")
    if kind == "clamp":
        low, high = _bounds(clamp)
        return [Op(pattern=pattern, op=kind, min=low, max=high) for pattern in patterns]
    return [_op(pattern, kind, operand, _weight(kind, weight)) for pattern in patterns]


def _op(pattern: str, kind: str, operand: Any, weight: float | None) -> Op:
    if isinstance(operand, int | float) and not isinstance(operand, bool):
        if kind in ("set", "lerp"):
            raise UsageError(f"{kind}: {operand!r}; expected a tensor (fill= takes a number)")
        return Op(pattern=pattern, op=kind, value=float(operand), weight=weight)
    if kind == "fill" or not hasattr(operand, "data_ptr"):
        raise UsageError(
            f"{kind}: {type(operand).__name__}; expected "
            f"{'a number' if kind == 'fill' else 'a tensor, or a number where it suits'}"
        )
    return Op(pattern=pattern, op=kind, operand=operand.detach(), weight=weight)


def _weight(kind: str, weight: Number | None) -> float | None:
    if kind == "lerp" and weight is None:
        raise UsageError("lerp: needs weight=, the share of the way from the parameter to the data")
    return float(weight) if weight is not None else None


def _bounds(clamp: tuple[Number | None, Number | None] | None) -> tuple[float | None, float | None]:
    if not isinstance(clamp, tuple) or len(clamp) != 2 or clamp == (None, None):
        raise UsageError(f"clamp: {clamp!r}; expected (min, max), one of which may be None")
    low, high = (float(bound) if bound is not None else None for bound in clamp)
    if low is not None and high is not None and low > high:
        raise UsageError(f"clamp: {low:g} is above {high:g}; give the smaller bound first")
    return low, high


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


_KINDS = frozenset(int(kind) for kind in EditKind)


def encode_op(op: EditOp) -> pb.EditOp:
    """The message of an operation."""
    return pb.EditOp(
        fqn=op.fqn,
        begin=op.box.begin if op.box is not None else (),
        end=op.box.end if op.box is not None else (),
        kind=pb.EditKind.ValueType(op.kind),
        value=op.value,
        weight=op.weight,
        min=op.min,
        max=op.max,
        with_data=op.with_data,
    )


def decode_ops(messages: Iterable[pb.EditOp]) -> list[EditOp]:
    """The operations of a manifest.

    Raises:
        UsageError: an operation has no kind that is known here.
    """
    return [_decode_op(message) for message in messages]


def manifest_digest(manifest: pb.EditManifest) -> bytes:
    """XXH3 (128 bit, canonical) of the manifest's deterministic bytes."""
    return xxhash.xxh3_128_digest(manifest.SerializeToString(deterministic=True))


def _decode_op(message: pb.EditOp) -> EditOp:
    if message.kind not in _KINDS:
        raise UsageError(
            f"ops: kind {message.kind} of {message.fqn[:200]!r}; expected one of "
            f"{', '.join(kind.word for kind in EditKind)}"
        )
    begin, end = tuple(message.begin), tuple(message.end)
    return EditOp(
        fqn=message.fqn,
        box=Box(begin, end) if begin or end else None,
        kind=EditKind(message.kind),
        value=message.value,
        weight=message.weight,
        min=message.min,
        max=message.max,
        with_data=message.with_data,
    )


KINDS: dict[str, EditKind] = {kind.word: kind for kind in EditKind}

_TAKES: dict[EditKind, frozenset[str]] = {
    EditKind.SET: frozenset(),
    EditKind.ADD: frozenset({"value", "weight"}),
    EditKind.MUL: frozenset({"value"}),
    EditKind.LERP: frozenset({"weight"}),
    EditKind.FILL: frozenset({"value"}),
    EditKind.CLAMP: frozenset({"min", "max"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EditWords:
    """One operation as users write it; None where they wrote nothing."""

    pattern: str
    """Glob over names; may end in a slice such as "[0:4]"."""
    op: str
    """set, add, mul, lerp, fill or clamp."""
    value: float | None = None
    weight: float | None = None
    min: float | None = None
    max: float | None = None
    data: bool = False
    """The operand comes as data."""


def edit_ops(index: NameIndex, words: Iterable[EditWords]) -> list[EditOp]:
    """An operation for each parameter that each pattern matches, in the order of the words.

    Raises:
        UsageError: a word or a number is wrong, or a pattern matches buffers only.
        NotFoundError: a pattern matches nothing.
    """
    return [op for one in words for op in _ops(index, one)]


def _ops(index: NameIndex, words: EditWords) -> Iterator[EditOp]:
    kind = KINDS.get(words.op)
    if kind is None:
        raise UsageError(f"op: {words.op!r}; expected one of {', '.join(KINDS)}")
    numbers = _numbers_said(words, kind)
    for item in _selected(index, words.pattern):
        yield EditOp(
            fqn=item.tensor.fqn,
            box=item.box if item.box != full_box(item.tensor.shape) else None,
            kind=kind,
            with_data=words.data,
            **numbers,
        )


def _selected(index: NameIndex, pattern: str) -> Selection:
    try:
        return select(index, pattern)
    except NotFoundError:
        glob = pattern if pattern in index.position else split_slices(pattern)[0]
        if index.match(glob):
            raise UsageError(
                f"{pattern!r} matches buffers only: they lie in the trainers' own memory, where "
                "no edit reaches; only parameters can be edited"
            ) from None
        raise


def _numbers_said(words: EditWords, kind: EditKind) -> dict[str, float]:
    given = {
        name: float(number)
        for name in ("value", "weight", "min", "max")
        if (number := getattr(words, name)) is not None
    }
    for name, number in given.items():
        if name not in _TAKES[kind] or (name == "value" and words.data):
            what = "with data" if words.data else "it"
            raise UsageError(f"{kind.word} {what} takes no {name}; leave it out")
        if math.isnan(number) and name != "value":
            raise UsageError(f"{name}: NaN; expected a number")
    needed = {EditKind.LERP: "weight", EditKind.FILL: "value"}.get(kind)
    if kind in (EditKind.ADD, EditKind.MUL) and not words.data:
        needed = "value"
    if needed is not None and needed not in given:
        hint = " or data" if kind in (EditKind.ADD, EditKind.MUL) else ""
        raise UsageError(f"{kind.word} of {words.pattern!r} needs a {needed}{hint}; give one")
    return given
