"""Select tensors of a layout by patterns: globs over names, with optional slices ("w[0:4, -3:]").

The whole name of a tensor means that tensor, whatever characters it has; only other patterns are
read as globs or slices. `Names.resolve` is that rule, for every door.

A `NameIndex` is built once per layout; `select` then takes a few milliseconds for any pattern
over 100,000 names.

Patterns come from users, so no pattern may be slow (globs.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import compress, groupby, islice
from typing import TypeAlias, overload

from paramd.errors import NotFoundError, UsageError
from paramd.layout.globs import Glob, NameColumns, literal, parse_glob
from paramd.layout.slices import SUFFIX, Slices, parse_slices, split_slices
from paramd.layout.types import Box, Layout, TensorKind, TensorLayout, full_box

Pattern: TypeAlias = str | Iterable[str]
"""One pattern, or some."""

MAX_PATTERN_BYTES = 1024

NEAR_COUNT = 40
"""Suggestions that share the longest prefix, and as many that share the longest suffix."""

KIND_COUNT = 80
SAMPLE_COUNT = 2000
"""Names sampled for kinds: from the start, from the end, and spread between."""

MAX_TEXT = 120
"""difflib costs the product of both lengths; longer names are not compared."""

_NUMBER = re.compile(r"[0-9]+")


def did_you_mean(names: Sequence[str], columns: NameColumns, wanted: str) -> str:
    """The tail of an error message: similar names, or how to list all of them."""
    if not names:
        return "; the layout holds no tensor"
    kinds = _kinds(names)
    if re.search(r"[*?\[]", wanted):
        candidates = list(kinds)
    else:
        candidates = [*_neighbours(names, columns, wanted), *kinds.values()]
    fitting = [name for name in dict.fromkeys(candidates) if len(name) <= MAX_TEXT]
    near = get_close_matches(wanted[:MAX_TEXT], fitting, n=3, cutoff=0.6)
    if not near:
        return f"; names look like {names[0]!r}, and '*' lists all {len(names)}"
    return "; did you mean " + " or ".join(map(repr, near)) + "?"


def _kinds(names: Sequence[str]) -> dict[str, str]:
    """Patterns of names that differ only in numbers, each with an example name."""
    stride = max(1, len(names) // SAMPLE_COUNT)
    sample = [*names[:SAMPLE_COUNT], *names[-SAMPLE_COUNT:], *names[::stride]]
    kinds: dict[str, str] = {}
    for name in sample:
        kinds.setdefault(_NUMBER.sub("*", name), name)
        if len(kinds) == KIND_COUNT:
            break
    return kinds


def _neighbours(names: Sequence[str], columns: NameColumns, wanted: str) -> list[str]:
    """Names that share the longest prefix with `wanted`, then those with the longest suffix."""
    found: list[str] = []
    for globs in (_begins_as, _ends_as):
        # Longer parts match fewer names, so bisection finds the longest one.
        low, high = 0, min(len(wanted), columns.longest)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if columns.match(globs(wanted, middle)) else (low, middle - 1)
            )
        if low:
            flags = columns.flags(columns.match(globs(wanted, low)))
            found.extend(islice(compress(names, flags), NEAR_COUNT))
    return found


def _begins_as(wanted: str, size: int) -> Glob:
    return Glob(tuple(wanted[:size]), (*[False] * size, True))


def _ends_as(wanted: str, size: int) -> Glob:
    return Glob(tuple(wanted[len(wanted) - size :]), (True, *[False] * size))


@dataclass(frozen=True, slots=True)
class SelectedTensor:
    """A selected tensor, and which part of it."""

    tensor: TensorLayout
    name: str
    """The name that matched: the fqn, else the first alias."""
    box: Box
    """The selected part, in coordinates of the full tensor."""
    names: tuple[str, ...]
    """All of its names that matched; more than one only for tied tensors."""

    @property
    def pattern(self) -> str:
        """A pattern that selects exactly this part of this tensor."""
        if self.box == full_box(self.tensor.shape):
            return self.name
        bounds = zip(self.box.begin, self.box.end, strict=True)
        return f"{self.name}[{', '.join(f'{begin}:{end}' for begin, end in bounds)}]"


@dataclass(frozen=True, slots=True)
class _Reading:
    """One meaning of a pattern: the names it matches, and the slice taken of each."""

    mask: int
    slices: Slices | None = None
    suffix: str = ""
    """The slice as written."""


class Names:
    """Names, indexed for matching. Immutable."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.position = {name: at for at, name in enumerate(names)}
        self.columns = NameColumns(names)

    def resolve(self, pattern: str) -> tuple[int, Slices | None]:
        """The mask of the names that a pattern means, and the slice it takes of each.

        A whole name comes first, then a whole name with a slice, then globs. "*" alone is all.

        Raises:
            UsageError: For a malformed slice, or if brackets may belong to names or not and
                both readings match.
        """
        found = SUFFIX.search(pattern)
        whole = self.position.get(pattern) if pattern != "*" else None
        if whole is not None:
            return 1 << whole, None
        before = self.position.get(pattern[: found.start()]) if found is not None else None
        if found is not None and before is not None:
            return 1 << before, parse_slices(found[1], pattern)
        readings = self._readings(pattern)
        if len(readings) > 1:
            one, other = (self._told(reading) for reading in readings[:2])
            raise UsageError(
                f"{pattern!r} may mean {one} or {other}; give whole names, or write [[] for a "
                "bracket that belongs to a name"
            )
        return (readings[0].mask, readings[0].slices) if readings else (0, None)

    def _readings(self, pattern: str) -> list[_Reading]:
        """The readings that find a name, each once."""
        plain = self._match(pattern, classes=False) if "[" in pattern else 0
        try:
            glob, slices = split_slices(pattern)
        except UsageError:
            if not plain:
                raise
            return [_Reading(plain)]
        suffix = pattern[len(glob) :]
        masks = [self._match(glob), self._match(glob, classes=False) if "[" in glob else 0]
        found = [_Reading(mask, slices, suffix) for mask in masks]
        return [one for one in dict.fromkeys([*found, _Reading(plain)]) if one.mask]

    def _told(self, reading: _Reading) -> str:
        first = repr(self.names[self.columns.positions(reading.mask)[0]])
        more = reading.mask.bit_count() - 1
        part = f"the part {reading.suffix} of " if reading.suffix else ""
        return part + first + (f" and {more} more" if more else "")

    def _match(self, glob: str, *, classes: bool = True) -> int:
        parsed = parse_glob(glob, classes=classes)
        if parsed.literal is not None:
            at = self.position.get(parsed.literal)
            return 1 << at if at is not None else 0
        return self.columns.match(parsed)


class NameIndex(Names):
    """The names of a layout, aliases included."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        pairs = [
            (name, number)
            for number, tensor in enumerate(layout.tensors)
            for name in (tensor.fqn, *tensor.aliases)
        ]
        super().__init__([name for name, _ in pairs])
        self.owners = [number for _, number in pairs]
        """Index of each name's tensor."""
        self.buffers = self._mask(
            [layout.tensors[n].kind is TensorKind.BUFFER for n in self.owners]
        )
        self.tied = self._mask([bool(layout.tensors[n].aliases) for n in self.owners])
        self.shapes = list(dict.fromkeys(tensor.shape for tensor in layout.tensors))
        numbers = {shape: number for number, shape in enumerate(self.shapes)}
        self.shape_of = [numbers[layout.tensors[n].shape] for n in self.owners]
        """Index into `shapes` for each name."""

    @staticmethod
    def _mask(flags: list[bool]) -> int:
        return int("0" + "".join("01"[flag] for flag in reversed(flags)), 2)


class Selection(Sequence[SelectedTensor]):
    """The selected tensors, each once, in layout order, created on access."""

    def __init__(self, index: NameIndex, mask: int, slices: dict[int, Slices | None]) -> None:
        self._index = index
        self._mask = mask
        self._slices = slices
        """By tensor index; entry -1 is the default."""
        self._groups: list[list[int]] | None = None

    @property
    def layout(self) -> Layout:
        return self._index.layout

    @property
    def tensors(self) -> tuple[TensorLayout, ...]:
        """The tensors without their parts. No item is created; of all, the layout's own tuple."""
        index, layout = self._index, self._index.layout
        if self._mask == index.columns.all:
            return layout.tensors
        owners = dict.fromkeys(compress(index.owners, index.columns.flags(self._mask)))
        return tuple(map(layout.tensors.__getitem__, owners))

    @property
    def with_buffers(self) -> bool:
        """Whether a buffer is among the tensors."""
        return bool(self._mask & self._index.buffers)

    @property
    def at_boundary(self) -> bool:
        """Whether only an agreed boundary can copy it: it has buffers, or arenas are mirrored."""
        return self.with_buffers or self._index.layout.mirrored

    def __len__(self) -> int:
        tied = self._mask & self._index.tied
        if not tied:
            return self._mask.bit_count()
        owners = {self._index.owners[at] for at in self._index.columns.positions(tied)}
        return (self._mask ^ tied).bit_count() + len(owners)

    def __iter__(self) -> Iterator[SelectedTensor]:
        return map(self._item, self._positions())

    @overload
    def __getitem__(self, at: int) -> SelectedTensor: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[SelectedTensor]: ...
    def __getitem__(self, at: int | slice) -> SelectedTensor | Sequence[SelectedTensor]:
        if isinstance(at, slice):
            return [self._item(group) for group in self._positions()[at]]
        return self._item(self._positions()[at])

    def _positions(self) -> list[list[int]]:
        """For each tensor the positions of its names that matched."""
        if self._groups is None:
            positions = self._index.columns.positions(self._mask)
            if self._mask & self._index.tied:
                owner = self._index.owners.__getitem__
                self._groups = [list(group) for _, group in groupby(positions, owner)]
            else:
                self._groups = [[at] for at in positions]
        return self._groups

    def _item(self, positions: list[int]) -> SelectedTensor:
        number = self._index.owners[positions[0]]
        tensor = self._index.layout.tensors[number]
        names = tuple(map(self._index.names.__getitem__, positions))
        slices = self._slices[number] if number in self._slices else self._slices[-1]
        box = full_box(tensor.shape) if slices is None else slices.box(tensor.shape, names[0])
        return SelectedTensor(tensor=tensor, name=names[0], box=box, names=names)


def each_pattern(patterns: Iterable[Pattern]) -> list[str]:
    """Patterns one by one, from wherever they are lists.

    Raises:
        UsageError: For what is no text.
    """
    found: list[str] = []
    given = [patterns] if isinstance(patterns, str) else patterns
    for one in given:
        if isinstance(one, list | tuple | set | frozenset):
            found += each_pattern(one)
        elif isinstance(one, str):
            found.append(one)
        else:
            raise UsageError(
                f"pattern: {type(one).__name__}; expected a name or a glob such as 'layers.*' "
                "(values have an argument of their own, such as set=)"
            )
    return found


def select(
    index: NameIndex, patterns: str | Iterable[Pattern], with_buffers: bool = False
) -> Selection:
    """Select the union of what the patterns match, among buffers too if `with_buffers`.

    A pattern is a whole name or a glob (`*` matches anything, dots too; `?`; `[abc]`; `[!abc]`) of
    at most 1 KiB, with an optional slice at its end ("w[0:4, -3:]").

    Raises:
        NotFoundError: If one matches nothing.
        UsageError: If one is malformed or ambiguous, a slice is out of range, or two select
            different parts of one tensor.
    """
    wanted = each_pattern(patterns)
    if not wanted:
        raise UsageError("no pattern was given; expected at least one, '*' selects all")
    by_slices: dict[Slices | None, int] = {}
    for pattern in wanted:
        mask, slices = _match(index, pattern, with_buffers)
        by_slices[slices] = by_slices.get(slices, 0) | mask
    if len(by_slices) == 1:
        ((slices, mask),) = by_slices.items()
        return Selection(index, mask, {-1: slices})
    mask = 0
    for part in by_slices.values():
        mask |= part
    return Selection(index, mask, _slices_by_tensor(index, by_slices))


def _match(index: NameIndex, pattern: str, with_buffers: bool) -> tuple[int, Slices | None]:
    size_bytes = len(pattern.encode("utf-8", "surrogatepass"))
    if not 0 < size_bytes <= MAX_PATTERN_BYTES:
        raise UsageError(
            f"a pattern of {size_bytes} bytes was given; expected 1 to {MAX_PATTERN_BYTES}; "
            "'*' selects all, and several patterns may be given"
        )
    found, slices = index.resolve(pattern)
    mask = found if with_buffers else found & ~index.buffers
    if not mask:
        raise NotFoundError(_nothing(index, pattern, found))
    if slices is not None:
        _check_slices(index, mask, slices)
    return mask, slices


def _check_slices(index: NameIndex, mask: int, slices: Slices) -> None:
    flags = index.columns.flags(mask)
    for number in set(compress(index.shape_of, flags)):
        at = next(at for at, n in enumerate(index.shape_of) if n == number and flags[at])
        slices.box(index.shapes[number], index.names[at])


def _slices_by_tensor(
    index: NameIndex, by_slices: dict[Slices | None, int]
) -> dict[int, Slices | None]:
    chosen: dict[int, Slices | None] = {}
    for slices, mask in by_slices.items():
        for at in index.columns.positions(mask):
            if chosen.setdefault(index.owners[at], slices) != slices:
                raise UsageError(
                    f"two patterns select different parts of {index.names[at]!r}; "
                    "select one part of a tensor at a time"
                )
    return chosen


_OTHER_FORMS = (
    (re.compile(r"\[-?\d+\]\Z"), "a slice has a colon: one row is [2:3]"),
    (re.compile(r"[\\{}()|^$]"), "patterns are globs (* ? [abc]), and several may be given"),
    (re.compile(r"[a-z] ?[<>=!~]"), "terms such as 'numel>1M' are for params and stats"),
)
"""What people write who know other patterns, and what to write here."""


def _nothing(index: NameIndex, pattern: str, found: int) -> str:
    shown = repr(pattern if len(pattern) <= 100 else f"{pattern[:97]}...")
    if found:
        count = found.bit_count()
        which = "only a buffer" if count == 1 else f"only {count} buffers"
        return f"{shown} matches no parameter, {which}; add buffers=True to read buffers"
    wanted = split_slices(pattern)[0]
    if inside := index.columns.match(parse_glob(f"{literal(wanted)}.*")):
        return f"{shown} is a module, with {inside.bit_count()} tensors: write {wanted + '.*'!r}"
    if meant := _with_prefix(index, wanted):
        inside = index.columns.match(parse_glob(meant))
        many = f"{inside.bit_count()} tensor{'s' if inside.bit_count() > 1 else ''}"
        slices = pattern[len(wanted) :]
        return f"no parameter matches {shown}; did you mean {meant + slices!r} ({many})?"
    hint = "".join(f"; {text}" for form, text in _OTHER_FORMS if form.search(pattern))
    return f"no parameter matches {shown}{did_you_mean(index.names, index.columns, wanted)}{hint}"


def _with_prefix(index: NameIndex, wanted: str) -> str:
    """The glob that `wanted` becomes with what the names have before it, such as "model."; "" if
    no name has it as whole parts. A module's becomes the glob of its tensors."""
    if wanted.startswith("*"):
        return ""
    for glob in (wanted, f"{wanted}.*"):
        inside = index.columns.match(parse_glob(f"*.{glob}"))
        if not inside:
            continue
        # The shortest prefix of the first name that finds it: the others may have another.
        parts = index.names[index.columns.positions(inside)[0]].split(".")
        for count in range(1, len(parts)):
            prefixed = literal(".".join(parts[:count])) + "." + glob
            found = index.columns.match(parse_glob(prefixed))
            if found:
                return prefixed if found == inside else f"*.{glob}"
    return ""
