"""Select tensors of a layout by patterns: globs over names, with optional slices ("w[0:4, -3:]").

The whole name of a tensor means that tensor, whatever characters it has; only other patterns are
read as globs or slices. `Names.resolve` is that rule, for every door.

A `NameIndex` is built once per layout; `select` then takes a few milliseconds for any pattern
over 100,000 names.

Patterns come from users, so no pattern may be slow. Names are stored by column: for every
position and character, an integer whose bit i is set if name i has it there. A match advances
all names together, with one AND and one OR for every position and token: at most
`longest name * tokens` pairs, and no backtracking. A pattern with more tokens than the longest
name matches nothing, which bounds the product.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import compress, groupby, islice
from typing import TypeAlias, overload

from paramd.errors import NotFoundError, UsageError
from paramd.layout.types import Box, Layout, TensorKind, TensorLayout, full_box

_DIGITS = bytes.maketrans(b"01", b"\x00\x01")

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
_SUFFIX = re.compile(r"\[([^\[\]]*:[^\[\]]*)\]\Z")
_DIM = re.compile(r"\s*([+-]?[0-9]{1,18})?\s*:\s*([+-]?[0-9]{1,18})?\s*(?::\s*(\+?0*1)?\s*)?\Z")


@dataclass(frozen=True, slots=True)
class CharClass:
    """A set of characters: `[abc]`, `[a-z]`, negated `[!abc]`; `?` is the negated empty one."""

    singles: frozenset[str] = frozenset()
    ranges: tuple[tuple[str, str], ...] = ()
    negated: bool = False

    def __contains__(self, char: str) -> bool:
        found = char in self.singles or any(low <= char <= high for low, high in self.ranges)
        return found is not self.negated


ANY_CHAR = CharClass(negated=True)


@dataclass(frozen=True, slots=True)
class Glob:
    """A parsed pattern: one token per character of the name, except those that `*` matches.

    `stars[i]`: whether a `*` precedes token i; the last entry is for the end.
    """

    tokens: tuple[str | CharClass, ...]
    stars: tuple[bool, ...]

    @property
    def literal(self) -> str | None:
        """The only name that can match; None if several can."""
        if any(self.stars):
            return None
        chars = [token for token in self.tokens if isinstance(token, str)]
        return "".join(chars) if len(chars) == len(self.tokens) else None


def literal(name: str) -> str:
    """The glob that matches only `name`."""
    return re.sub(r"[*?\[]", r"[\g<0>]", name)


def parse_glob(pattern: str, *, classes: bool = True) -> Glob:
    """Parse `*` (anything, dots too), `?`, `[abc]`, `[a-z]` and `[!abc]`, as fnmatch does.

    An unclosed `[` is literal, and so is `*` in `[*]`; without `classes` every bracket is, but for
    `[*]`, `[?]` and `[[]`, which always quote.
    """
    tokens: list[str | CharClass] = []
    stars = [False]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            stars[-1] = True
            continue
        token: str | CharClass = char
        if char == "?":
            token = ANY_CHAR
        elif pattern[at - 1 : at + 2] in ("[*]", "[?]", "[[]"):
            token, at = pattern[at], at + 2
        elif char == "[" and classes:
            # A "]" directly after "[" or "[!" belongs to the class.
            close = pattern.find("]", at + 1 + pattern.startswith("!", at))
            if close >= 0:
                token = _parse_class(pattern[at:close])
                at = close + 1
        tokens.append(token)
        stars.append(False)
    return Glob(tuple(tokens), tuple(stars))


def _parse_class(body: str) -> CharClass:
    negated = body.startswith("!")
    at = int(negated)
    singles: set[str] = set()
    ranges: list[tuple[str, str]] = []
    while at < len(body):
        if body.startswith("-", at + 1) and at + 2 < len(body):
            ranges.append((body[at], body[at + 2]))
            at += 3
        else:
            singles.add(body[at])
            at += 1
    return CharClass(frozenset(singles), tuple(ranges), negated)


class NameColumns:
    """Names by column, for matching globs. Bit i of a mask is name i."""

    def __init__(self, names: Sequence[str]) -> None:
        self.count = len(names)
        self.all = (1 << self.count) - 1
        self.longest = max(map(len, names), default=0)
        self._alphabet = sorted(set().union(*names))
        self._columns: list[dict[str, int]] = []
        # Reversed: the first digit of a binary literal is its highest bit.
        padding = _unused(self._alphabet)
        padded = [name.ljust(self.longest, padding) for name in reversed(names)]
        for column in zip(*padded, strict=True):
            self._columns.append(_masks("".join(column), padding))
        longer = [sum(column.values()) for column in self._columns]
        self._longer = [*longer, 0]
        self._ends = [a ^ b for a, b in zip([self.all, *longer], self._longer, strict=True)]

    def match(self, glob: Glob) -> int:
        tokens, stars = glob.tokens, glob.stars
        total, longest = len(tokens), self.longest
        if total > longest or not self.count:
            return self._ends[0] if total == 0 and self.count else 0
        matcher = _TokenMasks(self._alphabet, self._columns, self._longer)
        # reached[i]: names whose characters so far can match everything before token i.
        reached = [self.all] + [0] * total
        matched = 0
        for position in range(longest + 1):
            matched |= reached[total] & (self.all if stars[total] else self._ends[position])
            if position == longest or not any(reached):
                break
            # Skip tokens with more tokens after them than characters are left.
            lowest = max(0, total - (longest - position))
            for i in range(min(total - 1, position), lowest - 1, -1):
                kept = reached[i + 1] if stars[i + 1] else 0
                if reached[i]:
                    kept |= reached[i] & matcher.mask(position, tokens[i])
                reached[i + 1] = kept
            if not stars[0]:
                reached[0] = 0
        return matched

    def positions(self, mask: int) -> list[int]:
        """The indices of a mask's names, ascending."""
        return list(compress(range(self.count), self.flags(mask)))

    def flags(self, mask: int) -> bytes:
        """One byte per name: 1 if it is in the mask, else 0."""
        return format(mask, f"0{self.count}b").encode().translate(_DIGITS)[::-1]


@dataclass(slots=True)
class _TokenMasks:
    """The names that a token matches at a position; caches character classes for one match."""

    alphabet: list[str]
    columns: list[dict[str, int]]
    longer: list[int]
    _fitting: dict[CharClass, frozenset[str]] = field(default_factory=dict)
    _masks: dict[tuple[int, frozenset[str]], int] = field(default_factory=dict)

    def mask(self, position: int, token: str | CharClass) -> int:
        if isinstance(token, str):
            return self.columns[position].get(token, 0)
        if token is ANY_CHAR:
            return self.longer[position]
        fitting = self._fitting.get(token)
        if fitting is None:
            fitting = frozenset(char for char in self.alphabet if char in token)
            self._fitting[token] = fitting
        mask = self._masks.get((position, fitting))
        if mask is None:
            mask = self._masks[position, fitting] = self._united(position, fitting)
        return mask

    def _united(self, position: int, fitting: frozenset[str]) -> int:
        column = self.columns[position]
        inside = [mask for char, mask in column.items() if char in fitting]
        if 2 * len(inside) <= len(column):
            return _union(inside)
        others = [mask for char, mask in column.items() if char not in fitting]
        return self.longer[position] ^ _union(others)


def _union(masks: list[int]) -> int:
    united = 0
    for mask in masks:
        united |= mask
    return united


def _unused(alphabet: list[str]) -> str:
    return next(char for char in map(chr, range(len(alphabet) + 1)) if char not in alphabet)


def _masks(column: str, padding: str) -> dict[str, int]:
    chars = set(column)
    zeros = dict.fromkeys(map(ord, chars), "0")
    return {
        char: int(column.translate({**zeros, ord(char): "1"}), 2)
        for char in sorted(chars - {padding})
    }


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
class Slices:
    """One slice for each of the first dims; the remaining dims are taken whole."""

    dims: tuple[tuple[int | None, int | None], ...]

    def box(self, shape: tuple[int, ...], name: str) -> Box:
        """The box selected from a tensor of `shape`; UsageError names `name` if none fits."""
        if len(self.dims) > len(shape):
            raise UsageError(
                f"{name!r} has {len(shape)} dims, shape {list(shape)}, but the pattern slices "
                f"{len(self.dims)}; give at most {len(shape)} slices"
            )
        begins, ends = [0] * len(shape), list(shape)
        for dim, (begin, end) in enumerate(self.dims):
            size = shape[dim]
            begins[dim] = _bound(begin, 0, size, dim, name)
            ends[dim] = _bound(end, size, size, dim, name)
            if begins[dim] > ends[dim]:
                raise UsageError(
                    f"slice {_said(begin)}:{_said(end)} of dim {dim} of {name!r}, size {size}, "
                    "ends before it begins; put the smaller bound first"
                )
        return Box(tuple(begins), tuple(ends))


def split_slices(pattern: str) -> tuple[str, Slices | None]:
    """Split a pattern into glob and slices; UsageError if brackets with ":" have no slices."""
    found = _SUFFIX.search(pattern)
    if found is None:
        return pattern, None
    glob = pattern[: found.start()]
    if _SUFFIX.search(glob):
        raise UsageError(f"pattern {pattern!r} has two slices; combine them, as in [0:4, 2:8]")
    return glob, _parse_slices(found[1], pattern)


def _parse_slices(text: str, pattern: str) -> Slices:
    return Slices(tuple(_parse_dim(part, pattern) for part in text.split(",")))


def _parse_dim(text: str, pattern: str) -> tuple[int | None, int | None]:
    found = _DIM.match(text)
    if found is None:
        raise UsageError(
            f"{text.strip()!r} in pattern {pattern!r} is not a slice; expected begin:end with "
            "step 1, such as 0:4 or -3: (one row is written 2:3)"
        )
    return (
        int(found[1]) if found[1] is not None else None,
        int(found[2]) if found[2] is not None else None,
    )


def _bound(bound: int | None, default: int, size: int, dim: int, name: str) -> int:
    if bound is None:
        return default
    if not -size <= bound <= size:
        raise UsageError(
            f"bound {bound} is out of range for dim {dim} of {name!r}, which has size {size}; "
            f"expected {-size} to {size}"
        )
    return bound + size if bound < 0 else bound


def _said(bound: int | None) -> str:
    return "" if bound is None else str(bound)


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
        found = _SUFFIX.search(pattern)
        whole = self.position.get(pattern) if pattern != "*" else None
        if whole is not None:
            return 1 << whole, None
        before = self.position.get(pattern[: found.start()]) if found is not None else None
        if found is not None and before is not None:
            return 1 << before, _parse_slices(found[1], pattern)
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
