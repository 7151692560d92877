"""What users write of an edit (a pattern, a word, numbers) -> operations on regions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paramd.errors import NotFoundError, UsageError
from paramd.layout.edit_ops import EditKind, EditOp
from paramd.layout.regions import full_box
from paramd.layout.select import NameIndex, Selection, select
from paramd.layout.slices import split_slices

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
    numbers = _numbers(words, kind)
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


def _numbers(words: EditWords, kind: EditKind) -> dict[str, float]:
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
