"""From a planned file to its bytes: batches, then one buffer per batch, filled; the manifest.

A batch is a run of the file of at most `BATCH_BYTES`, so memory stays bounded however large a
tensor is. Its windows are boxes of tensors, each contiguous in the file, and name the snapshots
that hold them. Filling blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

from paramd.layout.dtypes import item_bytes
from paramd.layout.exports.dcp import cut_box
from paramd.layout.exports.files import BlendKind, Entry, ExportFile, SourceTensor, json_bytes
from paramd.layout.exports.plan import ExportPlan
from paramd.layout.plan import Landing, blocks, views_of
from paramd.layout.types import Box
from paramd.v1 import export_pb2
from paramd.version import __version__

if TYPE_CHECKING:
    from paramd_service.formats.blend import Blender


def manifest(
    plan: ExportPlan,
    message: export_pb2.ExportPlan,
    target: export_pb2.ExportTarget,
    files: Iterable[export_pb2.ExportedFile],
    *,
    job: str,
    created_s: float,
) -> bytes:
    """The manifest: the exported state, and every file with size and checksum."""
    settings = plan.settings
    view: dict[str, str | bool] = {
        "adapter": settings.adapter,
        "merge": settings.merge,
        "weights_from": settings.weights_from,
    }
    document = {
        "paramd_export": 1,
        "export_id": target.export_id,
        "job": job,
        "incarnation": message.incarnation,
        "step": message.step,
        "history": message.history,
        "edits": message.edits,
        "unsettled": message.unsettled,
        "layout_digest": message.layout_digest,
        "format": settings.format,
        "dtype": settings.dtype,
        "created_s": created_s,
        "version": __version__,
        "tied": plan.tied,
        "replica": settings.replica,
        "replicas_differ": list(message.replicas_differ) if message.replicas_compared else None,
        "renamed": {old: new for old, new in plan.names.items() if old != new},
        "parts": plan.parts,
        "missing": plan.missing,
        "extra_state": sorted(plan.names[name] for name in plan.extra.kept) if plan.extra else [],
        "layout_note": plan.note if settings.format == "safetensors" else "",
        **{name: value for name, value in view.items() if value},
        "tensor_bytes": sum(entry.data_bytes for file in plan.files for entry in file.entries),
        "files": [
            {"name": file.name, "size_bytes": file.size_bytes, "xxh3": file.xxh3.hex()}
            for file in files
        ],
    }
    return json_bytes(document)


BATCH_BYTES = 8 << 20
"""Most bytes of a batch, not counting one frame."""
BLOCK_BYTES = 4 << 20
"""Most bytes in the scratch buffer at once."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one rank's snapshot, and the part of a window they fill."""

    rank: int
    state_key: str
    begin_bytes: int
    """Within the snapshot."""
    size_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements of the snapshot."""
    target: Box | None
    """Within the window; None when the bytes are contiguous there."""
    target_begin_bytes: int = 0
    """First byte in the window, when contiguous."""


@dataclass(frozen=True, slots=True)
class Window:
    """A contiguous part of one entry's data in the file."""

    entry: Entry
    shape: tuple[int, ...]
    dtype: str
    """Dtype of the snapshots; the entry's differs when it is cast."""
    extents: tuple[Extent, ...]
    begins: bool
    """Whether it is the entry's first window."""
    ends: bool
    """Whether it is the entry's last."""
    inputs: tuple[Window, ...] = ()
    """What is blended into it; of no entry of their own."""

    @property
    def reads(self) -> tuple[Extent, ...]:
        """All extents: its own, then those of its inputs."""
        return (*self.extents, *(one for window in self.inputs for one in window.extents))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

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
        frame = self.entry.frame
        if frame is None:
            return self.data_bytes
        before = len(frame.before)
        after = frame.size_bytes - before - self.entry.data_bytes
        return self.data_bytes + before * self.begins + after * self.ends


Batch = tuple[Window, ...]


def batches(plan: ExportPlan, file: ExportFile) -> Iterator[Batch]:
    """Batches of the file after its header."""
    current: list[Window] = []
    current_bytes = 0
    for entry in file.entries:
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
            tuple(_inputs(plan, entry, box)),
        )


def _inputs(plan: ExportPlan, entry: Entry, box: Box) -> Iterator[Window]:
    """Windows of what is blended into a box of a tensor: only the part that it needs."""
    blend = entry.blend
    if blend is None:
        return
    others = [(key, plan.sources[key].tensors[number]) for key, number in blend.inputs]
    if blend.kind is BlendKind.LOW_RANK:
        (_, a), (_, b) = others
        rows, columns = (1, 0) if blend.transposed else (0, 1)
        boxes = [
            Box((0, box.begin[columns]), (a.shape[0], box.end[columns])),
            Box((box.begin[rows], 0), (box.end[rows], b.shape[1])),
        ]
    else:
        boxes = [box]
    for (key, tensor), part in zip(others, boxes, strict=True):
        extents = tuple(_extents(key, tensor, part))
        yield Window(entry, part.sizes, tensor.dtype, extents, True, True)


def _extents(state_key: str, tensor: SourceTensor, box: Box) -> Iterator[Extent]:
    size = item_bytes(tensor.dtype)
    for piece in tensor.pieces:
        for view in views_of(piece.region, piece.strides, tensor.shape, box, size):
            begin = piece.begin_bytes + view.begin_bytes
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
                yield from _strided(piece.rank, state_key, replace(view, begin_bytes=begin), size)


def _strided(rank: int, state_key: str, landing: Landing, size: int) -> Iterator[Extent]:
    for block in blocks(landing, size, BLOCK_BYTES):
        yield Extent(
            rank,
            state_key,
            block.begin_bytes,
            block.end_bytes - block.begin_bytes,
            block.target.sizes,
            landing.strides,
            block.target,
        )


FRAME_BYTES = 64 << 10
"""Buffer space beyond a batch, for frames."""


class Memory(Protocol):
    """A snapshot with random access to its bytes. Its methods may block."""

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        """Fill `target` with the bytes from `offset_bytes` on."""

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview | None:
        """The bytes without a copy, if they are in this process."""


Memories = Mapping[tuple[int, str], Memory]
"""Snapshots by rank and state key."""
Fetched = Mapping[tuple[int, int], memoryview]
"""Bytes fetched from peers, by index of window and extent."""


class Filler:
    """Produces the bytes of one file, batch after batch, in reused memory."""

    def __init__(self, memories: Memories) -> None:
        self._memories = memories
        self._buffer = memoryview(bytearray(BATCH_BYTES + FRAME_BYTES))
        self._wide: memoryview | None = None
        self._scratch: memoryview | None = None
        self._checksum = 0
        self._blender: Blender | None = None

    def close(self) -> None:
        """End what it started. Idempotent."""
        if self._blender is not None:
            self._blender.close()

    def pieces(self, batch: Batch, fetched: Fetched) -> Iterator[memoryview]:
        """Yield the batch's bytes in order; each piece is valid until the next is requested."""
        if len(batch) == 1 and batch[0].entry.frame is None:
            whole = _uncopied(batch[0], self._memories)
            if whole is not None:
                yield whole
                return
        filled = 0
        for number, window in enumerate(batch):
            size = window.size_bytes
            if filled + size > len(self._buffer):
                yield self._buffer[:filled]
                filled = 0
            if size > len(self._buffer):
                self._buffer = memoryview(bytearray(size))
            self._fill(window, self._buffer[filled : filled + size], fetched, number)
            filled += size
        if filled:
            yield self._buffer[:filled]

    def _fill(self, window: Window, target: memoryview, fetched: Fetched, number: int) -> None:
        frame = window.entry.frame
        if frame is None:
            self._data(window, target, fetched, number)
            return
        begin = 0
        if window.begins:
            begin = len(frame.before)
            target[:begin] = frame.before
            self._checksum = 0
        data = target[begin : begin + window.data_bytes]
        self._data(window, data, fetched, number)
        self._checksum = crc32(data, self._checksum)
        if window.ends:
            target[begin + len(data) :] = frame.after(self._checksum)

    def _data(self, window: Window, target: memoryview, fetched: Fetched, number: int) -> None:
        if window.entry.constant is not None:
            target[:] = window.entry.constant
            return
        casting = window.entry.dtype != window.dtype
        if casting and self._wide is None:
            self._wide = memoryview(bytearray(BATCH_BYTES))
        data = self._wide[: window.source_bytes] if casting and self._wide is not None else target
        for at, extent in enumerate(window.extents):
            self._extent(window, extent, data, fetched.get((number, at)))
        if window.inputs:
            self._blend(window, data, fetched, number)
        if casting:
            from paramd_service.formats.cast import cast_into

            cast_into(data, window.dtype, target, window.entry.dtype)

    def _blend(self, window: Window, data: memoryview, fetched: Fetched, number: int) -> None:
        from paramd_service.formats.blend import Blender, Operand

        if self._blender is None:
            self._blender = Blender()
        operands = []
        at = len(window.extents)
        for one in window.inputs:
            read = memoryview(bytearray(one.source_bytes))
            for extent in one.extents:
                self._extent(one, extent, read, fetched.get((number, at)))
                at += 1
            operands.append(Operand(one.dtype, one.shape, read))
        blend = window.entry.blend
        assert blend is not None
        self._blender.blend(blend, Operand(window.dtype, window.shape, data), operands)

    def _extent(
        self, window: Window, extent: Extent, data: memoryview, came: memoryview | None
    ) -> None:
        memory = self._memories[extent.rank, extent.state_key] if came is None else None
        if extent.target is None:
            run = data[extent.target_begin_bytes :][: extent.size_bytes]
            if memory is None:
                assert came is not None
                run[:] = came
            else:
                memory.read_into(run, extent.begin_bytes)
            return
        if memory is not None:
            came = memory.view(extent.begin_bytes, extent.size_bytes)
            if came is None:
                if self._scratch is None:
                    self._scratch = memoryview(bytearray(BLOCK_BYTES))
                came = self._scratch[: extent.size_bytes]
                memory.read_into(came, extent.begin_bytes)
        assert came is not None
        # Imported on first use: a sidecar that never exports stays small.
        from paramd_service.formats.cast import place

        width = item_bytes(window.dtype)
        place(came, extent.sizes, extent.strides, data, window.shape, extent.target, width)


def _uncopied(window: Window, memories: Memories) -> memoryview | None:
    """The window's bytes without a copy, if they are contiguous in this process."""
    if len(window.extents) != 1 or window.inputs or window.entry.dtype != window.dtype:
        return None
    (extent,) = window.extents
    memory = memories.get((extent.rank, extent.state_key))
    if memory is None or extent.target is not None or extent.size_bytes != window.data_bytes:
        return None
    return memory.view(extent.begin_bytes, extent.size_bytes)
