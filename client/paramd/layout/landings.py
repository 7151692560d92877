"""Landings: where parts of a snapshot belong in the tensors that are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paramd.errors import UsageError
from paramd.layout.regions import cover_numel
from paramd.layout.types import Box, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A strided view of one rank's snapshot, and the part of one result it fills."""

    tensor: int
    """Index into the plan's tensors."""
    begin_bytes: int
    """Offset within the snapshot of the view's first element."""
    sizes: tuple[int, ...]
    """Elements in each dim of the view; never 0."""
    strides: tuple[int, ...]
    """Elements of the snapshot between neighbours of each dim."""
    target: Region
    """Box of the result, or interval of the row-major flattened result."""
    size_bytes: int
    """Bytes of the snapshot from the view's first to its last element, both included."""
    direct: bool
    """These bytes, as they are, are one run of the row-major result."""
    target_begin_bytes: int | None = None
    """Where that run begins in the result; None unless `direct`."""

    @property
    def end_bytes(self) -> int:
        """Offset within the snapshot after the view's last element."""
        return self.begin_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a landing that is copied at once: the view `sizes` with the landing's strides."""

    begin_bytes: int
    """Offset within the snapshot of its first element."""
    end_bytes: int
    """Offset within the snapshot after its last element."""
    target: Box
    """What it fills, in coordinates of the result; its sizes are those of the view."""


def blocks(landing: Landing, item_bytes: int, max_bytes: int) -> Iterator[Block]:
    """Cuts a landing into blocks of at most `max_bytes`, in memory order and not overlapping.

    So a reader of a stream fills a scratch buffer of `max_bytes` block by block and makes
    one strided copy of each. Bytes between blocks belong to nobody.

    Raises:
        UsageError: `max_bytes` does not hold one element.
    """
    if max_bytes < item_bytes:
        raise UsageError(f"max_bytes is {max_bytes}; expected at least one item of {item_bytes}")
    assert isinstance(landing.target, Box), "an interval is always direct"
    # Slowest dim first: that is memory order, whatever the order of the dims.
    order = sorted(range(len(landing.sizes)), key=lambda dim: -landing.strides[dim])
    cut = _Cut(landing, order, item_bytes, max_bytes // item_bytes)
    yield from cut.blocks([0] * len(landing.sizes), list(landing.sizes), 0)


@dataclass(frozen=True, slots=True)
class _Cut:
    landing: Landing
    order: Sequence[int]
    item_bytes: int
    max_numel: int

    def blocks(self, begin: list[int], end: list[int], level: int) -> Iterator[Block]:
        """Blocks of the view's part [begin, end), of which dims before `level` are not cut."""
        sizes = [e - b for b, e in zip(begin, end, strict=True)]
        strides = self.landing.strides
        if cover_numel(sizes, strides) <= self.max_numel:
            yield self._block(begin, end)
            return
        dim = self.order[level]
        row = cover_numel([*sizes[:dim], 1, *sizes[dim + 1 :]], strides)
        rows = max(1, 1 + (self.max_numel - row) // max(strides[dim], 1))
        for low in range(begin[dim], end[dim], rows):
            inner_begin, inner_end = list(begin), list(end)
            inner_begin[dim], inner_end[dim] = low, min(low + rows, end[dim])
            yield from self.blocks(inner_begin, inner_end, level + 1)

    def _block(self, begin: list[int], end: list[int]) -> Block:
        landing, strides = self.landing, self.landing.strides
        assert isinstance(landing.target, Box)
        offset = sum(b * stride for b, stride in zip(begin, strides, strict=True))
        sizes = [e - b for b, e in zip(begin, end, strict=True)]
        first_bytes = landing.begin_bytes + offset * self.item_bytes
        origin = landing.target.begin
        return Block(
            begin_bytes=first_bytes,
            end_bytes=first_bytes + cover_numel(sizes, strides) * self.item_bytes,
            target=Box(
                tuple(o + b for o, b in zip(origin, begin, strict=True)),
                tuple(o + e for o, e in zip(origin, end, strict=True)),
            ),
        )
