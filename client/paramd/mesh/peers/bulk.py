"""A client's end of a bulk stream: connection, opening and reply. Methods that say so block."""

from __future__ import annotations

import asyncio
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, TypeVar

from paramd import streams
from paramd.errors import DataLossError, DeniedError, ParamdError, UnreachableError
from paramd.mesh.peers.grpc import ended
from paramd.mesh.peers.sidecars import StreamOffer

CONNECT_S: Final = 2.0
"""How long, in seconds, a sidecar's port for streams may take to answer before gRPC is used."""

STALL_S: Final = 60.0
"""Seconds without progress after which a stream is broken off."""

LOOK_S: Final = 0.5
"""Interval, in seconds, at which a thread that waits for bytes checks whether to stop."""


class NoStreamError(UnreachableError):
    """A sidecar's port for streams cannot be used, though gRPC can."""


class BulkStream:
    """One stream to a sidecar; `open` first. Only `stop` may be called from another thread."""

    def __init__(self, offer: StreamOffer, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.checksums = offer.leaves_host
        self.stopped = False
        self.moved_bytes = 0
        """Bytes received; over a slow link a window takes longer than a peer may be silent."""
        self._offer = offer
        self._sock: socket.socket | None = None
        self._patience_s = math.inf

    def open(self) -> None:
        """Connect, and show the grant. Blocks for some seconds at most.

        Raises:
            NoStreamError: If the sidecar does not answer at the port.
            ParamdError: If it refused.
            EOFError: If `stop` was called.
        """
        # Before the check: a later `stop` finds the socket.
        self._sock = self._connected()
        if self.stopped:
            raise EOFError
        grant = self._offer.grant
        opening = streams.Opening(grant.grant_id, self.begin, self.end, self.checksums)
        sealed = opening.sealed(grant.secret)
        self._patience_s = CONNECT_S
        try:
            self._sock.sendall(sealed)
            data = self.exactly(streams.REPLY_BYTES)
            status, size = streams.read_reply(data, sealed, grant.secret)
            if status:
                raise streams.error_of(status, self.exactly(size))
        except (DataLossError, DeniedError) as error:
            raise self._unusable(str(error)) from error
        except (OSError, EOFError) as error:
            if self.stopped or isinstance(error, ParamdError):
                raise
            raise self._unusable("its answer did not come") from error
        self._patience_s = math.inf

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def stop(self) -> None:
        """Make blocked calls end soon, with EOFError or OSError."""
        self.stopped = True
        if (sock := self._sock) is not None:
            with suppress(OSError):
                # Not SSLSocket's own, which would drop its TLS state under the thread.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def window(self) -> streams.Window:
        """The next window's header. Blocks. ParamdError: reported or malformed; else broken off."""
        window = streams.read_window(self.exactly(streams.WINDOW_HEADER_BYTES))
        if window.kind == streams.FAILED:
            raise streams.error_of(window.xxh3, self.exactly(window.size))
        return window

    def exactly(self, size_bytes: int) -> bytes:
        """The next bytes. Blocks. Raises as `fill`."""
        data = bytearray(size_bytes)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, part: memoryview) -> None:
        """Receive exactly the bytes of `part`. Blocks.

        Raises:
            EOFError, OSError: Broken off.
        """
        assert self._sock is not None
        done, size_bytes = 0, len(part)
        until_s = time.monotonic() + self._patience_s
        flags = 0 if isinstance(self._sock, ssl.SSLSocket) else socket.MSG_WAITALL
        while done < size_bytes:
            try:
                moved = self._sock.recv_into(part[done:], size_bytes - done, flags)
            except (BlockingIOError, TimeoutError):
                moved = -1  # nothing for a while: whoever watches this thread decides
            if moved == 0 or self.stopped or (moved < 0 and time.monotonic() > until_s):
                raise EOFError("the stream broke off")
            done += max(moved, 0)
            self.moved_bytes += max(moved, 0)

    def send(self, window: streams.Window, part: memoryview) -> None:
        """Send a window. Blocks.

        Raises:
            OSError: Broken off.
        """
        assert self._sock is not None
        # Header and bytes in one segment, where the socket knows how.
        more = 0
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.settimeout(STALL_S)
        elif window.size:
            more = socket.MSG_MORE
        # All of it: a part of a header would make the bytes that follow look like one.
        self._sock.sendall(window.packed(), more)
        self._sock.sendall(part)
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.settimeout(LOOK_S)

    def has_word(self) -> bool:
        """Whether the sidecar has sent something meanwhile."""
        assert self._sock is not None
        pending = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return pending or bool(waiting.poll(0))

    def _unusable(self, why: str) -> NoStreamError:
        offer = self._offer
        return NoStreamError(
            f"port {offer.port} of {offer.host}, for streams, cannot be used ({why}); let it "
            'through, or use transport="grpc"'
        )

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
                    sock.settimeout(LOOK_S)
                else:
                    # The kernel waits, without the interpreter's lock, and returns now and then.
                    sock.settimeout(None)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(LOOK_S))
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(STALL_S))
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise self._unusable(str(error)) from error
        return sock


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


Result = TypeVar("Result")


async def on_thread(work: Callable[[], Result], stop: Callable[[], None]) -> Result:
    """Run blocking work on a separate thread. Returns only once it has ended.

    If cancelled, `stop` is called first: otherwise the thread could write into memory that the
    caller has freed.
    """
    made: Future[Result] = Future()
    done = asyncio.wrap_future(made)

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="paramd-stream", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        stop()
        await ended({done})
        done.exception()  # retrieved, or asyncio logs it
        raise
