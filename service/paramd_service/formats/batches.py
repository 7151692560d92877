"""A planned file as batches: runs of the file, and where their bytes are. Pure.

A batch is at most `BATCH_BYTES` long, so memory stays bounded however large a tensor is. Its
parts are boxes of tensors, each one run of the file, and say which snapshots have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paramd.layout.dtypes import item_bytes
from paramd.layout.exports.dcp import cut_box
from paramd.layout.exports.files import Entry, ExportFile
from paramd.layout.exports.plan import ExportPlan
from paramd.layout.exports.sources import SourceTensor
from paramd.layout.landings import Landing, blocks
from paramd.layout.types import Box
from paramd.layout.views import View, views_of

BATCH_BYTES = 8 << 20
"""Most bytes of a batch, but for one frame."""

BLOCK_BYTES = 4 << 20
"""Most bytes that go through a scratch buffer at once."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one rank's snapshot, and which part of a window they fill."""

    rank: int
    state_key: str
    begin_bytes: int
    """Within the snapshot."""
    size_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements of the snapshot between neighbours of each dim."""
    target: Box | None
    """Within the window; None when the bytes are one run of it."""
    target_begin_bytes: int = 0
    """Where that run begins."""


@dataclass(frozen=True, slots=True)
class Window:
    """A run of the file's data, of one entry."""

    entry: Entry
    shape: tuple[int, ...]
    dtype: str
    """Of the snapshots; the entry's own may differ."""
    extents: tuple[Extent, ...]
    begins: bool
    """It is the entry's first."""
    ends: bool
    """It is the entry's last."""

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def source_bytes(self) -> int:
        """Bytes before the cast."""
        return self.numel * item_bytes(self.dtype)

    @property
    def data_bytes(self) -> int:
        """Bytes in the file, without a frame."""
        constant = self.entry.constant
        return len(constant) if constant is not None else self.numel * item_bytes(self.entry.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        frame = self.entry.frame
        if frame is None:
            return self.data_bytes
        before = len(frame.before)
        after = frame.size_bytes - before - self.entry.data_bytes
        return self.data_bytes + before * self.begins + after * self.ends


Batch = tuple[Window, ...]


def batches(plan: ExportPlan, file: ExportFile, *, first_entry: int = 0) -> Iterator[Batch]:
    """The file behind its header, from an entry on."""
    current: list[Window] = []
    current_bytes = 0
    for entry in file.entries[first_entry:]:
        for window in _windows(plan, entry):
            if current and current_bytes + window.size_bytes > BATCH_BYTES:
                yield tuple(current)
                current, current_bytes = [], 0
            current.append(window)
            current_bytes += window.size_bytes
    if current:
        yield tuple(current)


def _windows(plan: ExportPlan, entry: Entry) -> Iterator[Window]:
    if entry.constant is not None:
        yield Window(entry, (), entry.dtype, (), True, True)
        return
    tensor = plan.sources[entry.state_key].tensors[entry.tensor]
    if not entry.box.numel:
        yield Window(entry, entry.box.sizes, tensor.dtype, (), True, True)
        return
    size = max(item_bytes(tensor.dtype), item_bytes(entry.dtype))
    boxes = list(cut_box(entry.box, size, BATCH_BYTES))
    for number, box in enumerate(boxes):
        yield Window(
            entry,
            box.sizes,
            tensor.dtype,
            tuple(_extents(entry.state_key, tensor, box)),
            number == 0,
            number == len(boxes) - 1,
        )


def _extents(state_key: str, tensor: SourceTensor, box: Box) -> Iterator[Extent]:
    size = item_bytes(tensor.dtype)
    for piece in tensor.pieces:
        for view in views_of(piece.region, piece.strides, tensor.shape, box, size):
            begin = piece.begin_bytes + view.offset_bytes
            if view.target_begin_bytes is not None:
                yield Extent(
                    piece.rank,
                    state_key,
                    begin,
                    view.size_bytes,
                    view.sizes,
                    view.strides,
                    None,
                    view.target_begin_bytes,
                )
            else:
                yield from _strided(piece.rank, state_key, begin, view, size)


def _strided(rank: int, state_key: str, begin: int, view: View, size: int) -> Iterator[Extent]:
    landing = Landing(
        tensor=0,
        begin_bytes=begin,
        sizes=view.sizes,
        strides=view.strides,
        target=view.target,
        size_bytes=view.size_bytes,
        direct=False,
    )
    for block in blocks(landing, size, BLOCK_BYTES):
        yield Extent(
            rank,
            state_key,
            block.begin_bytes,
            block.end_bytes - block.begin_bytes,
            block.target.sizes,
            view.strides,
            block.target,
        )
