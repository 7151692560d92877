"""Reads pinned snapshots over streams: verified, resumed, watched. No torch.

Bytes come over TCP, received into their place by a thread (`StreamReader`), or over gRPC
(`Reader`). Either way the header's (incarnation, step) must be the pin's, offsets contiguous,
and the sidecar's last word that the snapshot still held; chunks over gRPC and windows that leave
the host have checksums. A bad or broken stream is resumed at the first missing byte, a few times.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import grpc.aio
from xxhash import xxh3_64

from paramd import streams
from paramd.errors import (
    ConflictError,
    DataLossError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
)
from paramd.mesh.peers.bulk import BulkStream, NoStreamError, on_thread
from paramd.mesh.peers.grpc import LIVENESS_S, LeaseEndedError, cancelled, error_of
from paramd.mesh.peers.sidecars import Answer, Pinned, Sidecars, SnapshotSource
from paramd.mesh.reading.places import Place, PlaceSink, Scratch
from paramd.state import StateName
from paramd.v1 import common_pb2, sidecar_pb2
from paramd.wire import Chunk

Transport = Literal["auto", "same-host", "stream", "grpc"]

RANGES_PER_CALL = 20_000

STREAM_FROM_BYTES = 1 << 20
"""Fewer bytes are faster over gRPC than with the extra call for a grant."""

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


class Landed:
    """Tells `progress` of the bytes that have landed. Any thread may call it."""

    def __init__(self, progress: Callable[[int, int], object] | None = None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self.begin(0)

    def begin(self, size_bytes: int) -> None:
        """A read, or another attempt at it, begins."""
        self._size_bytes, self._done_bytes = size_bytes, 0

    def __call__(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            if self._progress is not None:
                self._progress(min(self._done_bytes, self._size_bytes), self._size_bytes)


@dataclass(frozen=True, slots=True)
class Reading:
    """Snapshots that somebody keeps pinned, and how to read them."""

    sidecars: Sidecars
    pinned: Pinned
    deadline_s: float
    """On the monotonic clock."""
    transport: Transport = "auto"
    landed: Landed = field(default_factory=Landed)

    async def ask(self, rank: int, request: Any, answers: type[Answer]) -> Answer:
        """A sidecar's answer about its snapshot; ConflictError if it is about another step."""
        request.snapshot_id = self.pinned.pins[rank].snapshot_id
        left_s = self.deadline_s - time.monotonic()
        found = await self.sidecars.ask(rank, request, answers, left_s)
        said, pinned = cast("Any", found).header, self.pinned.state
        check_boundary(said.boundary_token, self.pinned.boundary_token, self.sidecars.who(rank))
        if (said.incarnation, said.step) != (pinned.incarnation, pinned.step):
            raise ConflictError(
                f"{self.sidecars.who(rank)} answered about step {said.step} of run "
                f"{said.incarnation}; expected step {pinned.step} of run "
                f"{pinned.incarnation}; try again"
            )
        return found

    async def digests(self, rank: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Digests of half-open byte ranges of a rank's snapshot. Raises as `ask`."""
        found: list[bytes] = []
        for begin in range(0, len(ranges), RANGES_PER_CALL):
            batch = ranges[begin : begin + RANGES_PER_CALL]
            spans = [sidecar_pb2.Span(begin=first, end=end) for first, end in batch]
            request = sidecar_pb2.DigestSnapshotRequest(ranges=spans)
            answer = await self.ask(rank, request, sidecar_pb2.DigestSnapshotResponse)
            said = StateName.of(answer.header)
            if said != self.pinned.state or len(answer.digests) != len(batch):
                raise ConflictError(
                    f"{self.sidecars.who(rank)} returned {len(answer.digests)} digests of {said}; "
                    f"expected {len(batch)} of {self.pinned.state}; try again"
                )
            found.extend(answer.digests)
        return found


@dataclass(frozen=True, slots=True)
class Expected:
    """The pin's state and size, which the stream must match."""

    state: StateName
    size_bytes: int
    boundary_token: int = 0


def check_boundary(said: int, expected: int, who: str) -> None:
    """Raise ConflictError unless the bytes are of the agreed boundary that was asked for.

    A state's name does not tell two boundaries of one step apart, which differ in buffers; the
    token of the request does, whoever restarts in between. 0: of no boundary.
    """
    if said != expected:
        raise ConflictError(
            f"{who} has a snapshot of another boundary than the one that was agreed on; try again"
        )


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


async def read_bytes(reading: Reading, rank: int, begin: int, end: int) -> bytearray:
    """Bytes [begin, end) of one rank's snapshot. Raises as `Reader.run`."""
    data = bytearray(end - begin)
    if data:
        memory = (ctypes.c_char * len(data)).from_buffer(data)
        sink = PlaceSink([Place(begin, end, ctypes.addressof(memory))])
        await read_range(reading, rank, sink, begin, end)
    return data


async def read_range(reading: Reading, rank: int, sink: PlaceSink, begin: int, end: int) -> None:
    """Read bytes [begin, end) of one rank's snapshot into `sink`. Raises as `Reader.run`."""
    if begin >= end:
        return
    sidecars, transport = reading.sidecars, reading.transport
    expected = Expected(reading.pinned.state, end, reading.pinned.boundary_token)
    source = sidecars.source(reading.pinned.pins[rank], end_bytes=end)
    large = end - begin >= STREAM_FROM_BYTES and sidecars.has_streams(rank)
    if transport == "stream" or (transport == "auto" and large):
        reader: Reader = StreamReader(source, sink, expected, begin)
        try:
            await reader.run(reading.deadline_s)
            return
        except NoStreamError:
            if transport == "stream":
                raise
            sidecars.keep_to_grpc(rank)
            begin = reader.offset_bytes
    await Reader(source, sink, expected, begin).run(reading.deadline_s)


class Reader:
    """Reads one rank's snapshot into a sink, resuming at the first missing byte. Over gRPC."""

    def __init__(
        self, source: SnapshotSource, sink: PlaceSink, expected: Expected, offset_bytes: int = 0
    ) -> None:
        self._source = source
        self._sink = sink
        self._expected = expected
        self.offset_bytes = offset_bytes
        """End of the bytes written so far."""
        # Set by the sidecar's last word, without which even all bytes prove nothing.
        self._proven = False

    async def run(self, deadline_s: float) -> None:
        """Read to the end; `deadline_s` is on the monotonic clock.

        Raises:
            UnreachableError: The sidecar died or hangs, or the stream broke too often.
            DataLossError: Bytes did not match their checksum, or preceded the header, after all
                retries.
            LeaseEndedError: Pin again.
            ConflictError: The bytes are of another state.
            AbortedError: Training changed them while they were read.
            DeadlineError: Not all bytes came in time.
        """
        failures = 0
        while not self._proven:
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
            if self._proven:
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
        moved_s, moved = time.monotonic(), self._moved()
        try:
            while not (await asyncio.wait({reading}, timeout=_LOOK_S))[0]:
                now_s = time.monotonic()
                if self._moved() != moved:
                    moved_s, moved = now_s, self._moved()
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

    def _moved(self) -> int:
        """A number that changes as long as bytes come."""
        return self.offset_bytes

    async def _read(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        told = False
        async with aclosing(self._source.chunks(self.offset_bytes, left_s)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.header is not None:
                    self._check_header(chunk.header)
                    told = True
                if chunk.size_bytes:
                    if not told:
                        raise DataLossError(
                            "its stream began without a header, so the step of its bytes is unknown"
                        )
                    self._land(chunk)
        self._proven = told and self.offset_bytes >= self._expected.size_bytes

    def _check_header(self, header: common_pb2.Header) -> None:
        check_boundary(header.boundary_token, self._expected.boundary_token, self._source.who)
        expected, sent = self._expected.state, StateName.of(header)
        if sent != expected:
            raise ConflictError(
                f"{self._source.who} sent {sent} of run {sent.incarnation}; the pin is of "
                f"{expected} of run {expected.incarnation}; try again"
            )

    def _check_next(self, offset_bytes: int, size_bytes: int) -> None:
        end = offset_bytes + size_bytes
        if offset_bytes != self.offset_bytes or end > self._expected.size_bytes:
            raise DataLossError(
                f"got bytes [{offset_bytes:,}, {end:,}) of {self._expected.size_bytes:,}; "
                f"expected them from {self.offset_bytes:,} on"
            )

    def _land(self, chunk: Chunk) -> None:
        self._check_next(chunk.offset_bytes, chunk.size_bytes)
        chunk.check()
        self._sink.write(chunk.offset_bytes, chunk.address, chunk.size_bytes)
        self._sink.landed(chunk.size_bytes)
        self.offset_bytes = chunk.offset_bytes + chunk.size_bytes


class StreamReader(Reader):
    """The same over a bulk stream, received by a thread into its place."""

    _stream: BulkStream | None = None

    def _moved(self) -> int:
        # Not `offset_bytes`: over a slow link a window takes longer than a peer may be silent.
        return self._stream.moved_bytes if self._stream is not None else 0

    async def _read(self, deadline_s: float) -> None:
        offer = await self._source.offer()
        self._check_header(offer.header)
        self._stream = stream = BulkStream(offer, self.offset_bytes, self._expected.size_bytes)
        try:
            await on_thread(functools.partial(self._receive, stream), stream.stop)
        except NotFoundError as error:
            raise LeaseEndedError(f"{self._source.who}: {error}") from error
        except (NoStreamError, DataLossError):
            raise
        except ParamdError as error:
            raise type(error)(f"{self._source.who}: {error}") from error

    def _receive(self, stream: BulkStream) -> None:
        """Receive everything, or as much as came before the stream broke off. Blocks."""
        scratch = Scratch()
        try:
            with closing(stream):
                stream.open()
                while not self._proven:
                    window = stream.window()
                    if window.kind == streams.DATA:
                        self._take(window, stream, scratch)
                    elif window.offset != stream.end or self.offset_bytes != stream.end:
                        raise DataLossError(f"its stream ended at byte {window.offset:,}")
                    else:
                        self._proven = True
        except (OSError, EOFError) as error:
            if isinstance(error, ParamdError):
                raise
            # Resumed at the first missing byte.

    def _take(self, window: streams.Window, stream: BulkStream, scratch: Scratch) -> None:
        """Receive the bytes of a window; written only once they are known to be right."""
        self._check_next(window.offset, window.size)
        end = window.offset + window.size
        summed = xxh3_64(seed=window.offset) if stream.checksums else None
        kept: list[tuple[int, int, int]] = []
        at = window.offset
        while at < end:
            address, until = self._sink.direct(at, end)
            if address is None:
                address = scratch.address(window.size) + at - window.offset
                kept.append((at, address, until - at))
            part = memory_at(address, until - at)
            stream.fill(part)
            if summed is not None:
                summed.update(part)
            at = until
        if summed is not None and summed.intdigest() != window.xxh3:
            raise DataLossError(
                f"{window.size:,} bytes at offset {window.offset:,} do not match their checksum"
            )
        for offset, address, size_bytes in kept:
            self._sink.write(offset, address, size_bytes)
        self._sink.landed(window.size)
        self.offset_bytes = end


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Writable bytes at an address, which must outlive the view."""
    if not size_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
