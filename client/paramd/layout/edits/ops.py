"""Edit operations as users write them, and resolved against parameters and dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import xxhash

from paramd.errors import NotFoundError, UsageError
from paramd.layout.dtypes import ITEM_BYTES
from paramd.layout.edits.kinds import (
    BITS,
    BY_WORD,
    KINDS,
    NUMBERS,
    WHOLE,
    EditKind,
    Kind,
    numbers_of,
    words,
)
from paramd.layout.select import NameIndex, Pattern, Selection, each_pattern, select
from paramd.layout.types import Box, full_box
from paramd.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    import torch

FLOAT_MAX: dict[str, float] = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
}
"""Largest finite number of each dtype that edits can compute in."""


WHOLE_BOX = Box((), ())
"""The box of an operation on a whole parameter."""


class EditState(StrEnum):
    """State of an edit. The last three are terminal."""

    STAGING = "STAGING"
    STAGED = "STAGED"
    COMMITTED = "COMMITTED"
    APPLIED = "APPLIED"
    """On all ranks, at one step."""
    ABORTED = "ABORTED"
    """On none."""
    LOST = "LOST"
    """The incarnation ended, with its parameters, before every rank reported the edit."""


EDIT_ENDS = frozenset({EditState.APPLIED, EditState.ABORTED, EditState.LOST})


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """One operation as given in Python or over REST; None: not given."""

    pattern: str
    """Glob over names; may end in a slice such as "[0:4]"."""
    op: str
    """`EditKind.word`."""
    value: float | None = None
    weight: float | None = None
    min: float | None = None
    max: float | None = None
    data: bool = False
    """The operand is data."""
    operand: torch.Tensor | None = field(default=None, repr=False, compare=False)
    """The data, on the client only; shaped like the one region that the pattern matches."""

    def numbers(self) -> dict[str, float]:
        """The numbers that were given, by name."""
        given = numbers_of(self)
        return {name: float(number) for name, number in given.items() if number is not None}

    def document(self) -> dict[str, Any]:
        """The REST form; the operand itself goes to the sidecars."""
        found: dict[str, Any] = {"pattern": self.pattern, "op": self.op}
        for name, number in self.numbers().items():
            found[name] = number if math.isfinite(number) else str(number)
        if self.data:
            found["data"] = True
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class EditTerms:
    """Options of an edit; see `AsyncMesh.edit`."""

    if_step: int | None = None
    reset_moments: bool = False
    allow_nonfinite: bool = False
    dry_run: bool = False
    note: str = ""


def ops_of(
    patterns: Iterable[Pattern], *, weight: float | None = None, **forms: Any
) -> list[OpSpec]:
    """The operations of one call of `mesh.edit`.

    `forms`: operands by the words of kinds; None: not given.

    Raises:
        UsageError: Unless exactly one form is given and its operand suits it.
    """
    patterns = each_pattern(patterns)
    given = {name: operand for name, operand in forms.items() if operand is not None}
    if len(given) != 1:
        found = ", ".join(f"{name}=" for name in given) or "none"
        expected = words(lambda kind: True, "{}=")
        raise UsageError(f"edit: expected exactly one of {expected} (given: {found})")
    ((word, operand),) = given.items()
    kind = KINDS[BY_WORD[word]]
    if weight is not None and "weight" not in kind.numbers:
        have = words(lambda kind: "weight" in kind.numbers, "{}=")
        raise UsageError(f"weight: only {have} take one, not {word}=")
    if weight is None and "weight" in kind.needed:
        raise UsageError(f"{word}: needs weight=; {kind.meaning}")
    if isinstance(operand, Mapping):
        if patterns:
            raise UsageError(
                f"edit: {word}= is a mapping by name; give no pattern beside it ({patterns[0]!r})"
            )
        return [_op(name, word, tensor, weight) for name, tensor in operand.items()]
    if not patterns:
        raise UsageError("edit: no pattern was given; expected at least one, '*' means all")
    return [_op(pattern, word, operand, weight) for pattern in patterns]


def _op(pattern: str, word: str, operand: Any, weight: float | None) -> OpSpec:
    kind = KINDS[BY_WORD[word]]
    weight = float(weight) if weight is not None else None
    if "min" in kind.numbers:
        low, high = _bounds(word, operand)
        return OpSpec(pattern=pattern, op=word, min=low, max=high)
    if isinstance(operand, int | float) and not isinstance(operand, bool):
        if word == "set":
            return OpSpec(pattern=pattern, op="fill", value=float(operand))
        if not kind.without_data:
            raise UsageError(f"{word}: {operand!r}; expected a tensor (fill= takes a number)")
        return OpSpec(pattern=pattern, op=word, value=float(operand), weight=weight)
    if not kind.with_data or not hasattr(operand, "data_ptr"):
        expected = " or ".join(["a tensor"] * kind.with_data + ["a number"] * kind.without_data)
        raise UsageError(f"{word}: {type(operand).__name__}; expected {expected}")
    return OpSpec(pattern=pattern, op=word, data=True, operand=operand.detach(), weight=weight)


def _bounds(word: str, given: Any) -> tuple[float | None, float | None]:
    if not isinstance(given, tuple | list) or len(given) != 2 or given.count(None) == 2:
        raise UsageError(f"{word}: {given!r}; expected (min, max), one of which may be None")
    low, high = (float(bound) if bound is not None else None for bound in given)
    if low is not None and high is not None and low > high:
        raise UsageError(f"{word}: {low:g} is above {high:g}; give the smaller bound first")
    return low, high


def check_op(op: pb.EditOp, dtype: str, *, allow_nonfinite: bool = False) -> None:
    """Check an operation on a parameter of `dtype`; UsageError: unsupported, or a bad operand."""
    if int(op.kind) not in KINDS:
        raise UsageError(
            f"ops: kind {op.kind} of {op.fqn[:200]!r}; expected one of {', '.join(BY_WORD)}"
        )
    kind = KINDS[EditKind(op.kind)]
    where = f"{EditKind(op.kind).word} of {op.fqn!r}"
    if not (kind.with_data if op.with_data else kind.without_data):
        takers = words(lambda kind: kind.with_data)
        raise UsageError(
            f"{where}: takes numbers, not data; {takers} take data"
            if op.with_data
            else f"{where}: needs data of the region's shape; set with_data and send it"
        )
    _check_dtype(kind, dtype, where)
    if "min" in kind.numbers:
        _check_bounds(op, where)
    for name in kind.taken(with_data=op.with_data):
        number = getattr(op, name)
        # An infinite bound is one not given.
        if name not in ("min", "max") or number != NUMBERS[name]:
            _check_number(name, number, dtype, where, allow_nonfinite=allow_nonfinite)


def _check_dtype(kind: Kind, dtype: str, where: str) -> None:
    if dtype in FLOAT_MAX or dtype in kind.others:
        return
    if dtype not in WHOLE | BITS:
        raise UsageError(f"{where}: dtype {dtype} cannot be edited")
    instead = words(lambda kind: dtype in kind.others).replace(", ", " or ")
    raise UsageError(f"{where}: dtype {dtype} does not support arithmetic; use {instead}")


def _check_bounds(op: pb.EditOp, where: str) -> None:
    if not op.min <= op.max or (op.min, op.max) == (-math.inf, math.inf):
        raise UsageError(
            f"{where}: min {op.min} and max {op.max}; expected at least one bound, and min not "
            "above max"
        )


def _check_number(
    name: str, number: float, dtype: str, where: str, *, allow_nonfinite: bool
) -> None:
    if name == "weight" and number == 0:
        raise UsageError(f"{where}: weight 0 changes nothing; 1 applies the operand in full")
    if dtype in FLOAT_MAX:
        if allow_nonfinite and name == "value":
            return
        if not math.isfinite(number) or abs(number) > FLOAT_MAX[dtype]:
            raise UsageError(
                f"{where}: {name} is {number}, which is not finite in {dtype}; "
                "an admin may allow that with allow_nonfinite"
            )
        return
    low, high = _integer_range(dtype)
    if not math.isfinite(number) or number != int(number) or not low <= int(number) <= high:
        raise UsageError(
            f"{where}: {name} is {number}; expected a whole number from {low} to {high} for "
            f"dtype {dtype}"
        )


def _integer_range(dtype: str) -> tuple[int, int]:
    if dtype == "bool":
        return 0, 1
    bits = 8 * ITEM_BYTES[dtype]
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def manifest_of(
    edit_id: str,
    ops: Iterable[pb.EditOp],
    terms: EditTerms,
    *,
    incarnation: int,
    layout_digest: str,
) -> pb.EditManifest:
    """The manifest of an edit of elements, the same wherever it is made."""
    return pb.EditManifest(
        edit_id=edit_id,
        incarnation=incarnation,
        layout_digest=layout_digest,
        ops=ops,
        undoable=True,
        if_step=terms.if_step,
        reset_moments=terms.reset_moments,
        allow_nonfinite=terms.allow_nonfinite,
    )


def manifest_digest(manifest: pb.EditManifest) -> bytes:
    """XXH3 (128 bit, canonical) of the manifest's deterministic bytes."""
    return xxhash.xxh3_128_digest(manifest.SerializeToString(deterministic=True))


def edit_ops(index: NameIndex, specs: Iterable[OpSpec]) -> list[pb.EditOp]:
    """One operation per parameter that a pattern matches, in the order of `specs`.

    Raises:
        UsageError: For an invalid word or number, or a pattern that matches buffers only.
        NotFoundError: For a pattern that matches nothing.
    """
    return [op for one in specs for op in _ops(index, one)]


def _ops(index: NameIndex, spec: OpSpec) -> Iterator[pb.EditOp]:
    kind = BY_WORD.get(spec.op)
    if kind is None:
        raise UsageError(f"op: {spec.op!r}; expected one of {', '.join(BY_WORD)}")
    numbers = NUMBERS | _checked_numbers(spec, kind)
    for item in _selected(index, spec.pattern):
        part = item.box if item.box != full_box(item.tensor.shape) else WHOLE_BOX
        yield pb.EditOp(
            fqn=item.tensor.fqn,
            begin=part.begin,
            end=part.end,
            kind=pb.EditKind.ValueType(kind),
            with_data=spec.data,
            **numbers,
        )


def _selected(index: NameIndex, pattern: str) -> Selection:
    try:
        return select(index, pattern)
    except NotFoundError:
        if index.resolve(pattern)[0]:
            raise UsageError(
                f"{pattern!r} matches buffers only, which are in the trainers' own memory; only "
                "parameters can be edited"
            ) from None
        raise


def _checked_numbers(spec: OpSpec, kind: EditKind) -> dict[str, float]:
    about, given = KINDS[kind], spec.numbers()
    taken = about.taken(with_data=spec.data)
    for name, number in given.items():
        if name not in taken:
            what = f"{kind.word} with data" if spec.data else kind.word
            raise UsageError(f"{what} takes no {name}; omit it")
        if math.isnan(number) and name != "value":
            raise UsageError(f"{name}: NaN; expected a number")
    for name in about.needed:
        if name in taken and name not in given:
            hint = " or data" if name == "value" and about.with_data else ""
            raise UsageError(f"{kind.word} of {spec.pattern!r} needs a {name}{hint}")
    return given
