"""Reads pinned snapshots into memory: verified, resumed, watched. No torch.

Every chunk has a checksum, offsets must be contiguous, and the header's (incarnation, step) must
be the pin's. A bad or broken stream is resumed at the first missing byte, a few times.

Bytes land in `Place`s, copied to an address or passed to `store` block by block. Places are
filled by a stream, in order of offsets (`PlaceSink`), or by threads that copy from shared memory,
in any order (`fill_from`).
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from paramd.errors import (
    ConflictError,
    DataLossError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
)
from paramd.mesh.peers.grpc import LIVENESS_S, LeaseEndedError, cancelled, error_of
from paramd.mesh.peers.sidecars import Pinned, Sidecars
from paramd.wire import Chunk

MAX_BLOCK_BYTES = 8 << 20
"""Largest place with a `store`, and so of its scratch memory."""

PART_BYTES = 16 << 20
"""Bytes that a thread copies per work item."""

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Destination of bytes [begin, end) of a snapshot; `address` or `store` is set."""

    begin: int
    end: int
    address: int | None = None
    """Copied there unchanged."""
    store: Callable[[int], None] | None = None
    """Called once with the aligned address of all the bytes, at most `MAX_BLOCK_BYTES`."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class Scratch:
    """Reusable aligned memory, allocated on first use."""

    def __init__(self) -> None:
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        self._address = 0

    def address(self, size_bytes: int) -> int:
        """Address of at least `size_bytes`; growing loses the contents."""
        if self._memory is None or len(self._memory) < size_bytes + _ALIGNMENT_BYTES:
            self._memory = (ctypes.c_char * (size_bytes + _ALIGNMENT_BYTES))()
            base = ctypes.addressof(self._memory)
            self._address = -(-base // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._address


class PlaceSink:
    """Writes a snapshot, in order of offsets, to `places` sorted by `begin`.

    Bytes in gaps between places are dropped. Places overlap where tensors share memory.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._at = 0
        """Index of the first place that is not full."""
        self._filling: dict[int, Scratch] = {}
        self._spare: list[Scratch] = []

    def write(self, offset_bytes: int, address: int, size_bytes: int) -> None:
        """As `Sink.write`."""
        end_bytes = offset_bytes + size_bytes
        for number in range(self._at, len(self._places)):
            place = self._places[number]
            if place.begin >= end_bytes:
                break
            begin = max(place.begin, offset_bytes)
            end = min(place.end, end_bytes)
            if begin < end:
                self._move(number, begin - place.begin, address + begin - offset_bytes, end - begin)
        while self._at < len(self._places) and self._places[self._at].end <= end_bytes:
            self._at += 1

    def _move(self, number: int, within: int, address: int, size_bytes: int) -> None:
        place = self._places[number]
        if place.address is not None:
            ctypes.memmove(place.address + within, address, size_bytes)
            return
        assert place.store is not None
        if size_bytes == place.size_bytes and address % _ALIGNMENT_BYTES == 0:
            place.store(address)
            return
        if number not in self._filling:
            self._filling[number] = self._spare.pop() if self._spare else Scratch()
        scratch = self._filling[number].address(place.size_bytes)
        ctypes.memmove(scratch + within, address, size_bytes)
        if within + size_bytes == place.size_bytes:
            place.store(scratch)
            self._spare.append(self._filling.pop(number))


class RandomAccess(Protocol):
    """A snapshot that several threads can read in any order."""

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copy bytes of the snapshot to `address`."""


def fill_from(
    jobs: Iterable[tuple[RandomAccess, Sequence[Place]]], pool: Executor, thread_count: int
) -> None:
    """Fill the places of every snapshot with threads of the pool. Blocks until done.

    Raises:
        ParamdError: from a source; the contents of the places are then undefined.
    """
    # Shared by the threads: `next` on a list iterator is atomic under the GIL.
    parts = iter([(source, part) for source, places in jobs for part in _parts(places)])
    failed = threading.Event()

    def work() -> None:
        scratch = Scratch()
        try:
            for source, part in parts:
                if failed.is_set():
                    return
                _fill(source, part, scratch)
        except BaseException:
            failed.set()
            raise

    workers = [pool.submit(work) for _ in range(thread_count)]
    # No thread may still write when the caller frees the destination.
    wait(workers)
    for worker in workers:
        worker.result()


def _fill(source: RandomAccess, part: Place, scratch: Scratch) -> None:
    if part.address is not None:
        source.read_into(part.address, part.begin, part.size_bytes)
        return
    assert part.store is not None
    address = scratch.address(part.size_bytes)
    source.read_into(address, part.begin, part.size_bytes)
    part.store(address)


def _parts(places: Iterable[Place]) -> Iterator[Place]:
    for place in places:
        if place.address is None:
            yield place
            continue
        for begin in range(place.begin, place.end, PART_BYTES):
            end = min(begin + PART_BYTES, place.end)
            yield Place(begin, end, place.address + begin - place.begin)


MAX_FAILURES = 3
"""Resumes without a single new byte before a read is given up."""

_LOOK_S = 0.5
# Effectively up to `_LOOK_S` later.
_PROBE_AFTER_S = 1.0

# mallopt(3) parameters.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# glibc refuses a larger mmap threshold than this.
_MMAP_THRESHOLD_BYTES = 32 << 20
_TRIM_THRESHOLD_BYTES = 64 << 20
_ARENAS = 2


class Sink(Protocol):
    """Destination of a snapshot. Called in order of offsets, once per byte."""

    def write(self, offset_bytes: int, address: int, size_bytes: int) -> None:
        """Take `size_bytes` at `address`, from snapshot byte `offset_bytes` on."""


class Source(Protocol):
    """One rank's snapshot, readable from any offset."""

    who: str
    """The rank, for error messages."""

    def chunks(self, offset_bytes: int, timeout_s: float) -> AsyncIterator[Chunk]:
        """Stream the snapshot from `offset_bytes` on; closing the iterator cancels the call."""

    async def probe(self) -> None:
        """Raise UnreachableError if the sidecar does not respond."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The pin's state and size, which the stream must match."""

    incarnation: int
    step: int
    size_bytes: int
    edits: int = -1
    """-1: not compared."""


@functools.cache
def keep_freed_memory() -> None:
    """Keep glibc from returning big blocks to the kernel; once per process.

    gRPC allocates every received message. By default glibc maps and unmaps blocks of that size,
    and faulting a fresh page in costs more than copying it, which halves a stream's speed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc: slower, not wrong
    # Setting either one disables glibc's dynamic adjustment of both.
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    # Otherwise each gRPC thread keeps freed chunks in its own malloc arena.
    mallopt(_M_ARENA_MAX, _ARENAS)


async def read_bytes(
    sidecars: Sidecars, pinned: Pinned, rank: int, begin: int, end: int, deadline_s: float
) -> bytearray:
    """Bytes [begin, end) of one rank's snapshot. Raises as `Reader.run`."""
    data = bytearray(end - begin)
    if data:
        memory = (ctypes.c_char * len(data)).from_buffer(data)
        sink = PlaceSink([Place(begin, end, ctypes.addressof(memory))])
        await read_range(sidecars, pinned, rank, sink, begin, end, deadline_s)
    return data


async def read_range(
    sidecars: Sidecars,
    pinned: Pinned,
    rank: int,
    sink: Sink,
    begin: int,
    end: int,
    deadline_s: float,
) -> None:
    """Read bytes [begin, end) of one rank's snapshot into `sink`. Raises as `Reader.run`."""
    expected = Expected(pinned.incarnation, pinned.step, end, pinned.edits)
    reader = Reader(sidecars.source(pinned.pins[rank], end_bytes=end), sink, expected)
    reader.offset_bytes = begin
    await reader.run(deadline_s)


class Reader:
    """Reads one rank's snapshot into a sink, resuming at the first missing byte."""

    def __init__(self, source: Source, sink: Sink, expected: Expected) -> None:
        self._source = source
        self._sink = sink
        self._expected = expected
        self.offset_bytes = 0
        """End of the bytes written so far; set it before `run` to start there."""

    async def run(self, deadline_s: float) -> None:
        """Read to the end; `deadline_s` is on the monotonic clock.

        Raises:
            UnreachableError: the sidecar died or hangs, or the stream broke too often.
            DataLossError: bytes did not match their checksum, or preceded the header, after
                all retries.
            LeaseEndedError: pin again. ConflictError: the bytes are of another state.
            DeadlineError: not all bytes came in time.
        """
        failures = 0
        while self.offset_bytes < self._expected.size_bytes:
            begin = self.offset_bytes
            try:
                await self._watched_read(deadline_s)
                error: ParamdError = UnreachableError(
                    f"{self._source.who}: the stream ended at byte {self.offset_bytes:,} of "
                    f"{self._expected.size_bytes:,}"
                )
            except grpc.aio.AioRpcError as found:
                error = error_of(found, self._source.who)
                if isinstance(error, DeadlineError) and time.monotonic() < deadline_s:
                    continue  # the limit of one call, not the caller's
                if isinstance(error, NotFoundError):
                    raise LeaseEndedError(str(error)) from found
            except DataLossError as found:
                error = DataLossError(f"{self._source.who}: {found}")
            if self.offset_bytes >= self._expected.size_bytes:
                return
            if not isinstance(error, UnreachableError | DataLossError):
                raise error
            failures = 1 if self.offset_bytes > begin else failures + 1
            if failures > MAX_FAILURES:
                raise error
            await asyncio.sleep(0.05 * failures)

    async def _watched_read(self, deadline_s: float) -> None:
        """Read one stream; return if it stalls, so that `run` resumes it."""
        reading = asyncio.ensure_future(self._read(deadline_s))
        moved_s, moved = time.monotonic(), self.offset_bytes
        try:
            while not (await asyncio.wait({reading}, timeout=_LOOK_S))[0]:
                now_s = time.monotonic()
                if self.offset_bytes != moved:
                    moved_s, moved = now_s, self.offset_bytes
                elif now_s - moved_s > LIVENESS_S:
                    return
                elif now_s - moved_s > _PROBE_AFTER_S:
                    await self._source.probe()
                if now_s > deadline_s:
                    raise DeadlineError(
                        f"{self._source.who}: only {self.offset_bytes:,} of "
                        f"{self._expected.size_bytes:,} bytes came in time; allow more time "
                        "(timeout=)"
                    )
            reading.result()
        finally:
            await cancelled(reading)

    async def _read(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        proven = False
        async with aclosing(self._source.chunks(self.offset_bytes, left_s)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.header is not None:
                    self._check_header(chunk)
                    proven = True
                if chunk.size_bytes:
                    if not proven:
                        raise DataLossError(
                            "its stream began without a header, so the step of its bytes is unknown"
                        )
                    self._land(chunk)

    def _check_header(self, chunk: Chunk) -> None:
        header = chunk.header
        assert header is not None
        expected = self._expected
        same = (header.incarnation, header.step) == (expected.incarnation, expected.step)
        if not same or expected.edits not in (-1, header.edits):
            raise ConflictError(
                f"{self._source.who} sent step {header.step} (edits {header.edits}) of incarnation "
                f"{header.incarnation}; the pin is of step {expected.step} (edits "
                f"{expected.edits}) of incarnation {expected.incarnation}; try again"
            )

    def _land(self, chunk: Chunk) -> None:
        end = chunk.offset_bytes + chunk.size_bytes
        if chunk.offset_bytes != self.offset_bytes or end > self._expected.size_bytes:
            raise DataLossError(
                f"got bytes [{chunk.offset_bytes:,}, {end:,}) of {self._expected.size_bytes:,}; "
                f"expected them from {self.offset_bytes:,} on"
            )
        chunk.check()
        self._sink.write(chunk.offset_bytes, chunk.address, chunk.size_bytes)
        self.offset_bytes = end
