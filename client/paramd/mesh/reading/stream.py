"""Streams of pinned snapshots into their landings: checked, resumed, watched.

The order of defence: a checksum for every chunk, offsets that must join up, the header's
(incarnation, step) against the pin's. What does not fit is asked for again from the first
missing byte, a few times; then the read is refused.

Where a snapshot's bytes land: straight at an address, or block by block through `store`.

Two ways fill places: a stream, in order of offsets (`PlaceSink`), and threads that copy
from memory of the same host, in any order (`fill_from`). No torch here.
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
from paramd.wire import Chunk

MAX_BLOCK_BYTES = 8 << 20
"""Largest place with a `store`: the size of the memory that it goes through."""

PART_BYTES = 16 << 20
"""Bytes copied by one thread before it looks for more work."""

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [begin, end) of a snapshot, and where they go; exactly one way is set."""

    begin: int
    end: int
    address: int | None = None
    """They are copied there as they are."""
    store: Callable[[int], None] | None = None
    """Takes them from an aligned address; at most `MAX_BLOCK_BYTES`, all at once."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class Scratch:
    """Memory that blocks go through, made once it is needed, then used again."""

    def __init__(self) -> None:
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        self._address = 0

    def address(self, size_bytes: int) -> int:
        """Aligned memory of at least `size_bytes`; its old content is lost when it grows."""
        if self._memory is None or len(self._memory) < size_bytes + _ALIGNMENT_BYTES:
            self._memory = (ctypes.c_char * (size_bytes + _ALIGNMENT_BYTES))()
            base = ctypes.addressof(self._memory)
            self._address = -(-base // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._address


class PlaceSink:
    """Takes a snapshot in order of offsets. `places` are sorted by `begin`.

    They may leave gaps, whose bytes are dropped, and overlap where tensors share memory.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._at = 0
        """First place that is not full yet."""
        self._filling: dict[int, Scratch] = {}
        self._spare: list[Scratch] = []

    def write(self, offset_bytes: int, address: int, size_bytes: int) -> None:
        """Copies `size_bytes` from `address` to where snapshot byte `offset_bytes` belongs."""
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
    """A snapshot whose bytes can be had in any order, by several threads."""

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copies bytes of the snapshot to `address`."""


def fill_from(
    jobs: Iterable[tuple[RandomAccess, Sequence[Place]]], pool: Executor, thread_count: int
) -> None:
    """Fills the places of every snapshot with threads of the pool. Blocks until done.

    Raises:
        ParamdError: a source's; the places' content is then undefined.
    """
    # A list's iterator: the interpreter's lock makes each `next` atomic.
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
    # Nobody may still write when the caller frees what is written to.
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
# Looked at every half second, so half a second later it is.
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
    """Where a snapshot's bytes go. Called in order of offsets, each byte once."""

    def write(self, offset_bytes: int, address: int, size_bytes: int) -> None:
        """Copies `size_bytes` from `address` to where snapshot byte `offset_bytes` belongs."""


class Source(Protocol):
    """One rank's snapshot, to be read from any offset."""

    who: str
    """Names the rank in errors."""

    def chunks(self, offset_bytes: int, timeout_s: float) -> AsyncIterator[Chunk]:
        """The snapshot's bytes from `offset_bytes` on; closing it cancels the call."""

    async def probe(self) -> None:
        """Raises UnreachableError when nobody answers there."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the pin promised."""

    incarnation: int
    step: int
    size_bytes: int
    edits: int = -1
    """-1: not compared."""


@functools.cache
def keep_freed_memory() -> None:
    """Keeps glibc from giving big blocks back to the kernel; once a process.

    gRPC allocates every received message anew. By default glibc maps and unmaps blocks of
    that size, and each first touch of a fresh page costs more than copying it: streams
    then move at half the speed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc: slower, not wrong
    # Setting one of them ends glibc's own adjusting, so both are needed.
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    # Each of gRPC's threads would keep freed chunks in an arena of its own.
    mallopt(_M_ARENA_MAX, _ARENAS)


class Reader:
    """Reads one rank's snapshot into a sink, resuming at the first missing byte."""

    def __init__(self, source: Source, sink: Sink, expected: Expected) -> None:
        self._source = source
        self._sink = sink
        self._expected = expected
        self.offset_bytes = 0
        """Bytes landed so far."""

    async def run(self, deadline_s: float) -> None:
        """Reads to the end, or raises; `deadline_s` is on the monotonic clock.

        Raises:
            UnreachableError: the sidecar died, hangs, or the stream broke too often.
            DataLossError: bytes did not match their checksum, or came before the header that
                says what they are, time and again.
            LeaseEndedError: pin anew. ConflictError: another step's bytes came.
            DeadlineError: it took too long.
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
                    continue  # one call's limit, not the caller's
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
        """One stream, with somebody watching whether it goes on."""
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
                        f"{self._source.who}: {self.offset_bytes:,} of "
                        f"{self._expected.size_bytes:,} bytes came in the time allowed; "
                        "allow more (timeout=)"
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
                            "its stream began without a header, so nothing says of which step "
                            "its bytes are"
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
                f"{header.incarnation}; pinned was step {expected.step} (edits "
                f"{expected.edits}) of "
                f"incarnation {expected.incarnation}; try again"
            )

    def _land(self, chunk: Chunk) -> None:
        end = chunk.offset_bytes + chunk.size_bytes
        if chunk.offset_bytes != self.offset_bytes or end > self._expected.size_bytes:
            raise DataLossError(
                f"bytes [{chunk.offset_bytes:,}, {end:,}) came where {self.offset_bytes:,} was "
                f"next of {self._expected.size_bytes:,}"
            )
        chunk.check()
        self._sink.write(chunk.offset_bytes, chunk.address, chunk.size_bytes)
        self.offset_bytes = end
