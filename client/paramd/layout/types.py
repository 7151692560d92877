"""Types of the layout (regions, pieces, tensors) and the geometry of regions. Pure.

Every range is half-open. Offsets named `*_begin` in a `Piece` count bytes of an arena; those in
a region count elements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import prod
from operator import sub
from typing import TypeAlias

from paramd.layout.adapters import Adapter


class TensorKind(Enum):
    """Whether a tensor is constant between updates (parameter) or not (buffer)."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open N-d box `[begin, end)` of a full tensor; 0-dim when both are empty."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(sub, self.end, self.begin))

    @property
    def numel(self) -> int:
        return prod(map(sub, self.end, self.begin))


@dataclass(frozen=True, slots=True)
class Interval:
    """A half-open interval `[begin, end)` in elements of a row-major flattened tensor."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


Region: TypeAlias = Box | Interval


@dataclass(frozen=True, slots=True)
class Piece:
    """One region held by one rank.

    `strides` are element strides of a box whose memory is dense but not row-major
    (channels-last weights, transposed parameters); None means row-major.
    """

    rank: int
    arena_begin: int
    region: Region
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class HubPart:
    """A part of a tensor that loaders of a model hub expect as a separate tensor."""

    name: str
    box: Box
    """In coordinates of the tensor in memory."""
    shape: tuple[int, ...]
    """As in files: the box's sizes without some dims of size 1."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One full parameter or buffer. `pieces` name every holder, replicas included."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    kind: TensorKind
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()
    placement: str = "replicated"
    trainable: bool | None = None
    """Whether it required a gradient, on some rank, when the job was attached; a script may
    freeze and unfreeze parameters later. None for buffers, and where it is not known."""
    hub: tuple[HubPart, ...] = ()
    """The parts in which transformers writes it; empty: as it is."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, repr=False)
class Layout:
    """All tensors of all ranks. `arena_bytes[r]` is the size of rank r's arena."""

    world_size: int
    arena_bytes: tuple[int, ...]
    tensors: tuple[TensorLayout, ...]
    mirrored: bool = False
    """Parameters stay in the trainers' own memory; arenas are copies, refreshed only at agreed
    boundaries that request it. All reads need such a boundary."""
    missing: tuple[str, ...] = ()
    """Entries of the model's state dict beside these tensors: extra or quantisation state."""
    hub_note: str = ""
    """Why `TensorLayout.hub` lacks the layout that transformers writes; empty: it has it."""
    adapters: tuple[Adapter, ...] = ()
    """The model's adapters of PEFT."""

    def __repr__(self) -> str:
        return f"<Layout of {len(self.tensors)} tensors on {self.world_size} ranks>"


def full_box(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Element strides of dense row-major memory; a dim of size 0 counts as 1."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(strides)


def cover_numel(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from a view's first to its last, both included; 0 if it is empty."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a view fills its memory without gaps or overlaps, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a view is dense and in row-major order; strides of size-1 dims do not count."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def intersection(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it has no element."""
    begin = tuple(map(max, one.begin, other.begin))
    end = tuple(map(min, one.end, other.end))
    return None if any(b >= e for b, e in zip(begin, end, strict=True)) else Box(begin, end)


def flat_interval(box: Box, shape: Sequence[int]) -> Interval | None:
    """`box` as an interval of the row-major flattened tensor; None if it is not contiguous."""
    partial = [dim for dim, size in enumerate(box.sizes) if size != shape[dim]]
    if partial and any(size != 1 for size in box.sizes[: partial[-1]]):
        return None
    begin = sum(b * stride for b, stride in zip(box.begin, row_major(shape), strict=True))
    return Interval(begin, begin + box.numel)


def boxes_of_interval(interval: Interval, shape: Sequence[int]) -> Iterator[Box]:
    """Split an interval of the flattened tensor into at most `2 * ndim - 1` boxes.

    Each is contiguous in the flattened tensor, and they come in its order. An empty interval has
    none.
    """
    yield from _boxes_within(interval.begin, interval.end, tuple(shape), ())


def _boxes_within(
    begin: int, end: int, shape: tuple[int, ...], index: tuple[int, ...]
) -> Iterator[Box]:
    if begin >= end:
        return
    after = tuple(i + 1 for i in index)
    if not shape:
        yield Box(index, after)
        return
    row = prod(shape[1:])
    first, head = divmod(begin, row)
    last, tail = divmod(end, row)
    if first == last:
        yield from _boxes_within(head, tail, shape[1:], (*index, first))
        return
    if head:
        yield from _boxes_within(head, row, shape[1:], (*index, first))
        first += 1
    if first < last:
        yield Box((*index, first, *((0,) * (len(shape) - 1))), (*after, last, *shape[1:]))
    yield from _boxes_within(0, tail, shape[1:], (*index, last))


def joined(spans: Iterable[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Sorted half-open spans, those with at most `gap` between them as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def offsets_in(spans: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """A function from a byte of an arena to its offset in the spans one after the other."""
    begins = [begin for begin, _ in spans]
    before = list(accumulate((end - begin for begin, end in spans), initial=0))

    def offset(at: int) -> int:
        index = bisect_right(begins, at) - 1
        return before[index] + at - begins[index]

    return offset
