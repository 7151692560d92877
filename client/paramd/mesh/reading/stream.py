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
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import grpc.aio
from xxhash import xxh3_64

from paramd import streams
from paramd.errors import (
    ConflictError,
    DataLossError,
    DeadlineError,
    DeniedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
)
from paramd.mesh.peers.grpc import LIVENESS_S, LeaseEndedError, cancelled, error_of
from paramd.mesh.peers.sidecars import Pinned, Sidecars, StreamOffer
from paramd.mesh.reading.places import Place, PlaceSink, Scratch, Sink
from paramd.v1 import common_pb2
from paramd.wire import Chunk

Transport = Literal["auto", "same-host", "stream", "grpc"]

STREAM_FROM_BYTES = 1 << 20
"""Fewer bytes are faster over gRPC than with the extra call for a grant."""

MAX_FAILURES = 3
"""Resumes without a single new byte before a read is given up."""

CONNECT_S = 2.0
"""How long a sidecar's port for streams may take to answer before gRPC is used."""

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


class NoStreamError(UnreachableError):
    """A sidecar's port for streams cannot be reached, though gRPC can."""


class Source(Protocol):
    """One rank's snapshot, readable from any offset."""

    who: str
    """The rank, for error messages."""

    def chunks(self, offset_bytes: int, timeout_s: float) -> AsyncIterator[Chunk]:
        """Stream the snapshot from `offset_bytes` on; closing the iterator cancels the call."""

    async def offer(self) -> StreamOffer:
        """A grant for one bulk stream."""

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
    sidecars: Sidecars,
    pinned: Pinned,
    rank: int,
    begin: int,
    end: int,
    deadline_s: float,
    transport: Transport = "auto",
) -> bytearray:
    """Bytes [begin, end) of one rank's snapshot. Raises as `Reader.run`."""
    data = bytearray(end - begin)
    if data:
        memory = (ctypes.c_char * len(data)).from_buffer(data)
        sink = PlaceSink([Place(begin, end, ctypes.addressof(memory))])
        await read_range(sidecars, pinned, rank, sink, begin, end, deadline_s, transport)
    return data


async def read_range(
    sidecars: Sidecars,
    pinned: Pinned,
    rank: int,
    sink: Sink,
    begin: int,
    end: int,
    deadline_s: float,
    transport: Transport = "auto",
) -> None:
    """Read bytes [begin, end) of one rank's snapshot into `sink`. Raises as `Reader.run`."""
    expected = Expected(pinned.incarnation, pinned.step, end, pinned.edits)
    source = sidecars.source(pinned.pins[rank], end_bytes=end)
    large = end - begin >= STREAM_FROM_BYTES and sidecars.has_streams(rank)
    if transport == "stream" or (transport == "auto" and large):
        reader: Reader = StreamReader(source, sink, expected, begin)
        try:
            await reader.run(deadline_s)
            return
        except NoStreamError:
            if transport == "stream":
                raise
            sidecars.keep_to_grpc(rank)
            begin = reader.offset_bytes
    await Reader(source, sink, expected, begin).run(deadline_s)


class Reader:
    """Reads one rank's snapshot into a sink, resuming at the first missing byte. Over gRPC."""

    def __init__(
        self, source: Source, sink: Sink, expected: Expected, offset_bytes: int = 0
    ) -> None:
        self._source = source
        self._sink = sink
        self._expected = expected
        self.offset_bytes = offset_bytes
        """End of the bytes written so far."""
        # Set by the sidecar's last word, without which even all bytes prove nothing.
        self._proven = offset_bytes >= expected.size_bytes

    async def run(self, deadline_s: float) -> None:
        """Read to the end; `deadline_s` is on the monotonic clock.

        Raises:
            UnreachableError: the sidecar died or hangs, or the stream broke too often.
            DataLossError: bytes did not match their checksum, or preceded the header, after
                all retries.
            LeaseEndedError: pin again. ConflictError: the bytes are of another state.
            AbortedError: training changed them while they were read.
            DeadlineError: not all bytes came in time.
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
        expected = self._expected
        same = (header.incarnation, header.step) == (expected.incarnation, expected.step)
        if not same or expected.edits not in (-1, header.edits):
            raise ConflictError(
                f"{self._source.who} sent step {header.step} (edits {header.edits}) of incarnation "
                f"{header.incarnation}; the pin is of step {expected.step} (edits "
                f"{expected.edits}) of incarnation {expected.incarnation}; try again"
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
        self.offset_bytes = chunk.offset_bytes + chunk.size_bytes


class StreamReader(Reader):
    """The same over a bulk stream, received by a thread into its place."""

    async def _read(self, deadline_s: float) -> None:
        offer = await self._source.offer()
        self._check_header(offer.header)
        receiving = _Receiving(offer, self.offset_bytes, self._expected.size_bytes)
        try:
            await on_thread(functools.partial(receiving.run, self._take), receiving.stop)
        except NotFoundError as error:
            raise LeaseEndedError(f"{self._source.who}: {error}") from error
        except (NoStreamError, DataLossError):
            raise
        except ParamdError as error:
            raise type(error)(f"{self._source.who}: {error}") from error
        self._proven = receiving.proven

    def _take(self, window: streams.Window, receiving: _Receiving) -> None:
        """Receive the bytes of a window; written only once they are known to be right."""
        self._check_next(window.offset, window.size)
        end = window.offset + window.size
        summed = xxh3_64(seed=window.offset) if receiving.checksums else None
        kept: list[tuple[int, int, int]] = []
        at = window.offset
        while at < end:
            address, until = None, end
            if isinstance(self._sink, PlaceSink):
                address, until = self._sink.direct(at, end)
            if address is None:
                address = receiving.scratch.address(window.size) + at - window.offset
                kept.append((at, address, until - at))
            part = memory_at(address, until - at)
            receiving.fill(part)
            if summed is not None:
                summed.update(part)
            at = until
        if summed is not None and summed.intdigest() != window.xxh3:
            raise DataLossError(
                f"{window.size:,} bytes at offset {window.offset:,} do not match their checksum"
            )
        for offset, address, size_bytes in kept:
            self._sink.write(offset, address, size_bytes)
        self.offset_bytes = end


class _Receiving:
    """One bulk stream, from its opening to its last window. `run` blocks; `stop` ends it."""

    def __init__(self, offer: StreamOffer, begin: int, end: int) -> None:
        self._offer = offer
        self._range = begin, end
        self.checksums = offer.leaves_host
        self.scratch = Scratch()
        self.proven = False
        self._sock: socket.socket | None = None
        self._stopped = False
        self._patience_s = math.inf

    def run(self, take: Callable[[streams.Window, _Receiving], None]) -> None:
        """Receive everything.

        Returns early if the stream breaks off; `proven` says whether it was whole.

        Raises:
            NoStreamError: nobody, or somebody else, answers at the port.
            DataLossError: not what was asked for.
            ParamdError: as the sidecar said.
        """
        begin, end = self._range
        grant = self._offer.grant
        opening = streams.Opening(grant.grant_id, begin, end, self.checksums)
        sealed = opening.sealed(grant.secret)
        with self._connected() as sock:
            # Before looking: whoever stops us later finds the socket.
            self._sock = sock
            try:
                if self._stopped:
                    return
                sock.sendall(sealed)
                self._check_reply(sealed)
                while not self.proven:
                    window = streams.read_window(self._exactly(streams.WINDOW_HEADER_BYTES))
                    if window.kind == streams.FAILED:
                        raise streams.error_of(window.xxh3, self._exactly(window.size))
                    if window.kind == streams.DATA:
                        take(window, self)
                    elif window.offset != end:
                        raise DataLossError(f"the stream ended at byte {window.offset:,}")
                    else:
                        self.proven = True
            except ParamdError:
                raise
            except (OSError, EOFError):
                return  # resumed at the first missing byte

    def _check_reply(self, sealed: bytes) -> None:
        """Check that the sidecar of the grant answers.

        Raises:
            NoStreamError: another program does, as behind a forwarded port, or none.
        """
        grant = self._offer.grant
        self._patience_s = CONNECT_S
        try:
            data = self._exactly(streams.REPLY_BYTES)
            status, size = streams.read_reply(data, sealed, grant.secret)
            if status:
                raise streams.error_of(status, self._exactly(size))
        except (OSError, EOFError) as error:
            if self._stopped:
                raise EOFError from error
            raise self._unanswered("its answer did not come") from error
        except (DataLossError, DeniedError) as error:
            raise self._unanswered(str(error)) from error
        self._patience_s = math.inf

    def _unanswered(self, why: str) -> NoStreamError:
        offer = self._offer
        return NoStreamError(
            f"port {offer.port} of {offer.host}, for streams, cannot be used ({why}); let it "
            'through, or use transport="grpc"'
        )

    def stop(self) -> None:
        """Let `run` return soon. From any thread."""
        self._stopped = True
        if (sock := self._sock) is not None:
            with suppress(OSError):
                # Not SSLSocket's own, which would drop its TLS state under the thread.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def fill(self, part: memoryview) -> None:
        """Receive exactly the bytes of `part`. Raises EOFError, OSError."""
        assert self._sock is not None
        done, size_bytes = 0, len(part)
        until_s = time.monotonic() + self._patience_s
        flags = 0 if isinstance(self._sock, ssl.SSLSocket) else socket.MSG_WAITALL
        while done < size_bytes:
            try:
                moved = self._sock.recv_into(part[done:], size_bytes - done, flags)
            except BlockingIOError:
                moved = -1  # nothing for a while: whoever watches `run` decides
            if moved == 0 or self._stopped or (moved < 0 and time.monotonic() > until_s):
                raise EOFError("the stream broke off")
            done += max(moved, 0)

    def _exactly(self, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self.fill(memoryview(data))
        return bytes(data)

    def _connected(self) -> socket.socket:
        offer = self._offer
        if not offer.port:
            raise NoStreamError("its sidecar has no port for streams; its log says why")
        try:
            sock = socket.create_connection((offer.host, offer.port), timeout=CONNECT_S)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if offer.tls is not None:
                    sock = offer.tls.wrap_socket(sock, server_hostname=offer.host)
                # The kernel waits, without the interpreter's lock, and returns now and then.
                sock.settimeout(None)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(_LOOK_S))
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise self._unanswered(str(error)) from error
        return sock


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Writable bytes at an address, which must outlive the view."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


Result = TypeVar("Result")


async def on_thread(work: Callable[[], Result], stop: Callable[[], None]) -> Result:
    """Run blocking work on a thread of its own. Returns only once it has ended.

    If cancelled, `stop` is called first: otherwise the thread could write into memory that the
    caller has freed.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as found:
            error = found
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="paramd-stream", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait({done})
        done.exception()  # retrieved, or asyncio logs it
        raise
