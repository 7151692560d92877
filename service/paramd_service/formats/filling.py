"""Fills the buffer of a batch: copies, strided copies, casts, frames. Blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol
from zlib import crc32

from paramd.layout.dtypes import item_bytes
from paramd_service.formats.batches import BATCH_BYTES, BLOCK_BYTES, Batch, Extent, Window

FRAME_BYTES = 64 << 10
"""Room for frames behind a batch."""


class Memory(Protocol):
    """A snapshot whose bytes can be had in any order, without waiting for a network."""

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        """Copies bytes from `offset_bytes` on until `target` is full."""

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview | None:
        """The bytes without a copy, when they are in this process."""


Memories = Mapping[tuple[int, str], Memory]
"""By rank and state key; what is not there has been fetched."""

Fetched = Mapping[tuple[int, int], memoryview]
"""Bytes that came over the network, by numbers of window and extent."""


class Filler:
    """Makes the bytes of one file, batch after batch, in memory that is used again."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BATCH_BYTES + FRAME_BYTES))
        self._wide: memoryview | None = None
        self._scratch: memoryview | None = None
        self._checksum = 0

    def pieces(self, batch: Batch, memories: Memories, fetched: Fetched) -> Iterator[memoryview]:
        """The batch's bytes, in order; each piece is good until the next is asked for."""
        if len(batch) == 1 and batch[0].entry.frame is None:
            whole = _uncopied(batch[0], memories)
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
            self._fill(window, self._buffer[filled : filled + size], memories, fetched, number)
            filled += size
        if filled:
            yield self._buffer[:filled]

    def _fill(
        self,
        window: Window,
        target: memoryview,
        memories: Memories,
        fetched: Fetched,
        number: int,
    ) -> None:
        frame = window.entry.frame
        if frame is None:
            self._data(window, target, memories, fetched, number)
            return
        begin = 0
        if window.begins:
            begin = len(frame.before)
            target[:begin] = frame.before
            self._checksum = 0
        data = target[begin : begin + window.data_bytes]
        self._data(window, data, memories, fetched, number)
        self._checksum = crc32(data, self._checksum)
        if window.ends:
            target[begin + len(data) :] = frame.after(self._checksum)

    def _data(
        self,
        window: Window,
        target: memoryview,
        memories: Memories,
        fetched: Fetched,
        number: int,
    ) -> None:
        if window.entry.constant is not None:
            target[:] = window.entry.constant
            return
        casting = window.entry.dtype != window.dtype
        if casting and self._wide is None:
            self._wide = memoryview(bytearray(BATCH_BYTES))
        data = self._wide[: window.source_bytes] if casting and self._wide is not None else target
        for at, extent in enumerate(window.extents):
            self._extent(window, extent, data, memories, fetched.get((number, at)))
        if casting:
            from paramd_service.formats.cast import cast_into

            cast_into(data, window.dtype, target, window.entry.dtype)

    def _extent(
        self,
        window: Window,
        extent: Extent,
        data: memoryview,
        memories: Memories,
        came: memoryview | None,
    ) -> None:
        memory = memories[extent.rank, extent.state_key] if came is None else None
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
        _place(window, extent, came, data)


def _uncopied(window: Window, memories: Memories) -> memoryview | None:
    """The window's bytes as they lie in this process, when they do."""
    if len(window.extents) != 1 or window.entry.dtype != window.dtype:
        return None
    (extent,) = window.extents
    memory = memories.get((extent.rank, extent.state_key))
    if memory is None or extent.target is not None or extent.size_bytes != window.data_bytes:
        return None
    return memory.view(extent.begin_bytes, extent.size_bytes)


def _place(window: Window, extent: Extent, source: memoryview, data: memoryview) -> None:
    """One strided copy of an extent into its box of the window."""
    # Loaded when first needed: a sidecar that exports nothing stays small.
    import numpy as np

    assert extent.target is not None
    width = item_bytes(window.dtype)
    element = np.dtype(f"V{width}") if width > 8 else np.dtype(f"u{width}")
    strides = tuple(stride * width for stride in extent.strides)
    values = np.ndarray(extent.sizes, element, source, strides=strides)
    box = extent.target
    inner = tuple(slice(b, e) for b, e in zip(box.begin, box.end, strict=True))
    np.frombuffer(data, element).reshape(window.shape)[inner] = values


Wanted = Callable[[Extent], bool]


def extents_to_fetch(batch: Batch, is_remote: Wanted) -> list[tuple[tuple[int, int], Extent]]:
    """What has to come over the network for a batch, by numbers of window and extent."""
    return [
        ((number, at), extent)
        for number, window in enumerate(batch)
        for at, extent in enumerate(window.extents)
        if is_remote(extent)
    ]
