"""Patterns over the names of a layout: globs, with an optional slice at the end.

A `NameIndex` is prepared once for a layout; `select` then costs a few milliseconds for
any pattern on 100,000 names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import overload

from paramd.errors import NotFoundError, UsageError
from paramd.layout.globs import NameColumns, did_you_mean, parse_glob
from paramd.layout.regions import full_box
from paramd.layout.slices import Slices, split_slices
from paramd.layout.types import Box, Layout, TensorKind, TensorLayout

MAX_PATTERN_BYTES = 1024


@dataclass(frozen=True, slots=True)
class SelectedTensor:
    """A tensor that was asked for, and which part of it."""

    tensor: TensorLayout
    name: str
    """The name it was found by: the fqn if that matched, else the first alias that did."""
    box: Box
    """The part wanted, in the coordinates of the full tensor."""
    names: tuple[str, ...]
    """All of its names that matched; more than one only for tied tensors."""


class NameIndex:
    """The names of a layout, aliases included, ready for matching. Immutable."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        pairs = [
            (name, number)
            for number, tensor in enumerate(layout.tensors)
            for name in (tensor.fqn, *tensor.aliases)
        ]
        self.names = [name for name, _ in pairs]
        self.owners = [number for _, number in pairs]
        """Number of the tensor that each name means."""
        self.position = {name: at for at, name in enumerate(self.names)}
        self.columns = NameColumns(self.names)
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

    def match(self, glob: str) -> int:
        """The mask of the names that a glob without slices matches."""
        parsed = parse_glob(glob)
        if parsed.literal is not None:
            at = self.position.get(parsed.literal)
            return 1 << at if at is not None else 0
        return self.columns.match(parsed)


class Selection(Sequence[SelectedTensor]):
    """The tensors that patterns chose, each once, in the order of the layout.

    Items are made when asked for, so that choosing everything stays cheap.
    """

    def __init__(self, index: NameIndex, mask: int, slices: dict[int, Slices | None]) -> None:
        self._index = index
        self._mask = mask
        self._slices = slices
        """By tensor number; when it lacks one, entry -1 holds."""
        self._groups: list[list[int]] | None = None

    @property
    def layout(self) -> Layout:
        """The layout it was chosen from."""
        return self._index.layout

    @property
    def with_buffers(self) -> bool:
        """Whether a buffer is among the tensors."""
        return bool(self._mask & self._index.buffers)

    @property
    def at_boundary(self) -> bool:
        """Whether only an agreed boundary can copy it: buffers, and all of mirrored arenas."""
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
        names = tuple(self._index.names[at] for at in positions)
        slices = self._slices[number] if number in self._slices else self._slices[-1]
        box = full_box(tensor.shape) if slices is None else slices.box(tensor.shape, names[0])
        return SelectedTensor(tensor=tensor, name=names[0], box=box, names=names)


def select(
    index: NameIndex, patterns: str | Sequence[str], with_buffers: bool = False
) -> Selection:
    """Chooses what the patterns match; several patterns unite.

    Args:
        index: the names to choose from.
        patterns: globs (`*` matches anything, dots too; `?`; `[abc]`; `[!abc]`), each of
            at most 1 KiB, each with an optional slice at its end ("w[0:4, -3:]").
        with_buffers: whether buffers may match.

    Raises:
        UsageError: a pattern is malformed, a slice is out of range, or two patterns ask for
            different parts of one tensor.
        NotFoundError: a pattern matches nothing.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
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
    glob, slices = (pattern, None) if pattern in index.position else split_slices(pattern)
    found = index.match(glob)
    mask = found if with_buffers else found & ~index.buffers
    if not mask:
        raise NotFoundError(_nothing(index, pattern, glob, found))
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
            number = index.owners[at]
            if chosen.setdefault(number, slices) != slices:
                raise UsageError(
                    f"two patterns ask for different parts of {index.names[at]!r}; "
                    "ask for one part of a tensor at a time"
                )
    return chosen


def _nothing(index: NameIndex, pattern: str, glob: str, found: int) -> str:
    shown = repr(pattern if len(pattern) <= 100 else f"{pattern[:97]}...")
    if found:
        count = found.bit_count()
        which = "only a buffer" if count == 1 else f"only {count} buffers"
        return f"{shown} matches no parameter, {which}; add buffers=True to read buffers"
    return f"no parameter matches {shown}{did_you_mean(index.names, index.columns, glob)}"
