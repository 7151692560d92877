"""Bulk streams of a sidecar: a TCP listener beside gRPC (paramd/streams.py has the framing).

The event loop accepts, shakes hands and reads the opening, none of which waits for a stranger. A
separate thread then sends a snapshot, from mapped memory and without the interpreter's lock, or
receives an edit's data. A stream holds its snapshot, so its memory is not reused, and ends with the
lease, the token or the incarnation. Its last window is sent only if the snapshot proved valid
throughout.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field

from google.protobuf.message import Message

from paramd import streams
from paramd.errors import (
    DataLossError,
    DeniedError,
    ExhaustedError,
    NotFoundError,
    ParamdError,
    UsageError,
)
from paramd.security.tickets import Claims
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import checksum_of
from paramd_service import admission
from paramd_service.admission import Shares, Who
from paramd_service.aio import post
from paramd_service.sidecar.calls import CALLER, EDITORS, Call, CallTable, check_range, check_role
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.snapshots.store import Snapshot, SnapshotStore
from paramd_service.sidecar.uploads import Part, Upload

GRANT_S = 10.0
"""Validity of a grant."""
MAX_GRANTS = 1024
"""Most grants not yet used."""
MAX_STRANGERS = 64
"""Most connections that have not shown a grant; beyond this, the oldest is closed."""
OPENING_S = 3.0
"""How long a connection may take to show its grant, TLS included."""
STALL_S = 60
"""A stream whose peer takes or sends nothing for this long is ended."""
DRAIN_S = 2.0
"""How long to wait for the sender of an edit to read the answer."""
UPLOAD_SHARES = 4
"""Streams that an upload counts for: it has two windows of memory."""
LOOK_S = 0.25
"""Interval at which running streams are compared with their leases."""
ACCEPTS_AT_ONCE = 16
ACCEPT_PAUSE_S = 0.5


def accepted_now(
    listener: socket.socket, rank: RankSidecar, again: Callable[[], None]
) -> Iterator[socket.socket]:
    """Connections that wait, several at once, so that a flood of strangers delays others little.
    `again` is called after a pause in which the listener is not read."""
    for _ in range(ACCEPTS_AT_ONCE):
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors: the connection stays in the backlog; retrying at once would spin.
            rank.log("accept-failed", error=repr(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            loop.call_later(ACCEPT_PAUSE_S, again)
            return
        yield accepted


@dataclass(frozen=True, slots=True)
class _Granted:
    """The call that a grant was made for; either `snapshot_id` or `edit_id` is empty."""

    secret: bytes
    snapshot_id: str
    edit_id: str
    incarnation: int
    claims: Claims
    who: Who
    until_s: float


@dataclass(eq=False, slots=True)
class _Stream:
    """A running stream: of a snapshot, or of an edit's data."""

    granted: _Granted
    opening: streams.Opening
    sock: socket.socket
    store: SnapshotStore
    snapshot: Snapshot | None
    entry: Upload | None
    thread: threading.Thread = field(init=False)


class StreamServer:
    """Grants, connections that have not shown one yet, and running streams.

    All methods run on the event loop, except `_serve` and what it calls.
    """

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._loop = asyncio.get_running_loop()
        self._tls: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._grants: dict[bytes, _Granted] = {}
        self._grant_shares = Shares(MAX_GRANTS, "grants of streams")
        self._shares = Shares(rank.config.max_calls, "streams of this sidecar")
        self._strangers: dict[_Stranger, None] = {}
        self._running: set[_Stream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._looking: asyncio.TimerHandle | None = None
        rank.revocations.on_news.append(self._look)

    def calls(self) -> CallTable:
        return {"GrantStream": Call(unary=self.grant)}

    def start(self) -> None:
        """Listen on gRPC's host. Without a port readers keep to gRPC, which is slower."""
        rank = self._rank
        host = rank.config.listen.rpartition(":")[0].removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in dict.fromkeys((rank.config.stream_port, 0)):
            try:
                self._listener = socket.create_server((host, port), family=family, backlog=64)
                break
            except OSError as error:
                rank.log("no-streams", port=port, reason=repr(error))
        if self._listener is None:
            return
        self._listener.setblocking(False)
        rank.stream_port = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Refuse new streams, end the running ones, and wait for their threads."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for stranger in list(self._strangers):
            stranger.close()
        for stream in self._running:
            _hang_up(stream.sock)
        await self._idle.wait()

    async def grant(self, request: pb.GrantStreamRequest, _timeout_s: float) -> Message:
        """Answer GrantStream."""
        rank = self._rank
        answer = pb.GrantStreamResponse(port=rank.stream_port)
        if request.edit_id:
            check_role(CALLER.get(), EDITORS)
            entry = await rank.parts.uploads().opened(request.edit_id, CALLER.get().token_id)
            answer.header.CopyFrom(messages.header(rank))
            answer.staged_bytes, answer.size_bytes = entry.staged_bytes, entry.size_bytes
        else:
            snapshot = rank.pins.store.filled(request.snapshot_id)
            answer.header.CopyFrom(messages.header_of(rank, snapshot))
        if not answer.port:
            return answer
        self._forget_grants()
        who = admission.CALLER.get()
        self._grant_shares.take(who)
        grant_id = secrets.token_bytes(streams.ID_BYTES)
        granted = _Granted(
            secret=secrets.token_bytes(streams.SECRET_BYTES),
            snapshot_id=request.snapshot_id,
            edit_id=request.edit_id,
            incarnation=rank.incarnation,
            claims=CALLER.get(),
            who=who,
            until_s=time.monotonic() + GRANT_S,
        )
        self._grants[grant_id] = granted
        rank.faults.at("stream-granted")
        answer.grant_id, answer.secret = grant_id, granted.secret
        answer.valid_ms = int(1000 * GRANT_S)
        return answer

    def open(self, sock: socket.socket, data: bytes) -> None:
        """Start the stream that an opening asks for. Takes over the socket.

        Raises:
            ParamdError: If it is refused; the caller keeps the socket.
        """
        rank = self._rank
        opening = streams.read_opening(data)
        granted = self._grants.get(opening.grant_id)
        if granted is None or granted.until_s < time.monotonic():
            raise DeniedError("the grant of this stream is unknown, used or too old; get a new one")
        opening.check(data, granted.secret)
        # Only now: a peer that does not know the secret must not use up the grant.
        self._take_grant(opening.grant_id)
        rank.revocations.check(granted.claims)
        if granted.incarnation != rank.incarnation:
            raise NotFoundError("the run of the stream's snapshot has ended")
        store, snapshot, entry = rank.pins.store, None, None
        if granted.edit_id:
            entry = rank.parts.uploads().upload(granted.edit_id)
            size_bytes = entry.size_bytes
        else:
            snapshot = store.filled(granted.snapshot_id)
            size_bytes = snapshot.size_bytes
        check_range(opening.begin, opening.end - opening.begin, size_bytes)
        self._shares.take(granted.who, 1 if snapshot is not None else UPLOAD_SHARES)
        if snapshot is not None:
            store.hold(snapshot)
        stream = _Stream(granted, opening, sock, store, snapshot, entry)
        self._running.add(stream)
        self._idle.clear()
        reply = streams.reply(data, granted.secret)
        stream.thread = threading.Thread(
            target=self._serve, args=(stream, reply), name="paramd-stream", daemon=True
        )
        try:
            stream.thread.start()
        except RuntimeError as error:
            self._forget(stream)
            raise ExhaustedError("no thread is left for a stream; try again") from error
        self._look_later()

    def refuse(self, sock: socket.socket, error: ParamdError) -> None:
        """Send a connection the reason, if it takes that at once, and close it."""
        if isinstance(error, DeniedError | DataLossError):
            self._rank.refusals.saw("stream", str(error))
        with suppress(OSError):
            sock.send(streams.refusal(error))
        sock.close()

    def forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger, None)

    def _take_grant(self, grant_id: bytes) -> None:
        self._grant_shares.give_back(self._grants.pop(grant_id).who)

    def _forget_grants(self) -> None:
        now_s = time.monotonic()
        # Grants are in the order of their age.
        while self._grants and next(iter(self._grants.values())).until_s < now_s:
            self._take_grant(next(iter(self._grants)))

    def _accept(self) -> None:
        assert self._listener is not None
        for accepted in accepted_now(self._listener, self._rank, self._accept_again):
            while len(self._strangers) >= MAX_STRANGERS:
                next(iter(self._strangers)).close()
            try:
                stranger = _Stranger(self, accepted, self._context())
            except OSError:
                # The peer has left already, or the certificate cannot be read now.
                accepted.close()
                continue
            self._strangers[stranger] = None
            stranger.start()

    def _context(self) -> ssl.SSLContext | None:
        """TLS of the listener; loaded for the first connection, as it takes half a MiB."""
        if self._tls is None and self._rank.tls is not None:
            self._tls = self._rank.tls.ssl_context(ssl.TLSVersion.TLSv1_3)
        return self._tls

    def _accept_again(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _look_later(self) -> None:
        if self._looking is None and self._running:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """End streams whose lease, token or incarnation has ended."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for stream in self._running:
            try:
                self._check(stream)
            except ParamdError:
                # The reader asks for another grant, and learns why it gets none.
                _hang_up(stream.sock)
        self._look_later()

    def _check(self, stream: _Stream) -> None:
        """Raise unless the bytes sent may still be used."""
        granted = stream.granted
        self._rank.revocations.check(granted.claims)
        if self._rank.incarnation != granted.incarnation:
            raise NotFoundError("the run of the stream's snapshot has ended")
        if granted.edit_id:
            self._rank.parts.uploads().upload(granted.edit_id)
        else:
            self._rank.pins.store.filled(granted.snapshot_id)

    def _ended(self, stream: _Stream) -> None:
        stream.sock.close()
        self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        self._running.discard(stream)
        if not self._running:
            self._idle.set()
        self._shares.give_back(stream.granted.who, 1 if stream.snapshot else UPLOAD_SHARES)
        if stream.snapshot is not None:
            # A store that was closed meanwhile frees the memory now.
            stream.store.drop(stream.snapshot)

    def _serve(self, stream: _Stream, reply: bytes) -> None:
        """Send reply, windows and proof, or receive the windows. On the stream's thread."""
        try:
            self._rank.faults.at("stream-open")
            _make_blocking(stream.sock)
            stream.sock.sendall(reply)
            if stream.snapshot is not None:
                _send_windows(stream, stream.snapshot.view(), self._rank.faults.at)
                stream.sock.sendall(self._proof(stream))
            else:
                stream.sock.sendall(self._taken(stream))
                _drain(stream.sock)
        except (OSError, ValueError):
            # The reader has left or stalled, or was hung up on: it may ask for another grant.
            _hang_up(stream.sock)
        except Exception as error:
            self._rank.log("stream-failed", error=repr(error))
        finally:
            post(self._loop, self._ended, stream)

    def _proof(self, stream: _Stream) -> bytes:
        """The last window: whether the bytes sent are valid. On the stream's thread."""
        try:
            asyncio.run_coroutine_threadsafe(self._checked(stream), self._loop).result()
        except ParamdError as error:
            return streams.failure(error)
        return streams.Window(streams.LAST, stream.opening.end, 0).packed()

    def _taken(self, stream: _Stream) -> bytes:
        """Receive an edit's data window by window; return the answer. On the stream's thread."""
        opening, entry = stream.opening, stream.entry
        assert entry is not None
        buffers = [bytearray(streams.WINDOW_BYTES) for _ in range(2)]
        taking: Future[None] | None = None
        at = opening.begin
        try:
            # While one window is checked and copied on the edits' thread, the next one arrives.
            while at < opening.end:
                buffers.reverse()
                window = streams.read_window(_exactly(stream.sock, streams.WINDOW_HEADER_BYTES))
                part = memoryview(buffers[0])[: window.size]
                _fill(stream.sock, part)
                if window.kind != streams.DATA or window.offset != at:
                    raise UsageError(f"a window at byte {window.offset}; expected data at {at}")
                if opening.checksums and checksum_of(part, at) != window.xxh3:
                    raise DataLossError(
                        f"{window.size:,} bytes at {at:,} do not match their checksum"
                    )
                if taking is not None:
                    taking.result()
                work = self._take(entry, _part_of(at, part))
                taking = asyncio.run_coroutine_threadsafe(work, self._loop)
                at += window.size
                self._rank.faults.at("stream-window")
            if taking is not None:
                taking.result()
        except ParamdError as error:
            return streams.failure(error)
        finally:
            if taking is not None:
                # It reads one of the buffers, whose memory must not be reused before.
                wait([taking])
        return streams.Window(streams.LAST, at, 0).packed()

    async def _take(self, upload: Upload, part: Part) -> None:
        await self._rank.parts.uploads().take_parts(upload, [part])

    async def _checked(self, stream: _Stream) -> None:
        self._check(stream)


class _Stranger:
    """A connection that has not shown a grant."""

    def __init__(self, server: StreamServer, sock: socket.socket, tls: ssl.SSLContext | None):
        self._server = server
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        if tls is not None:
            self._sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._is_shaken = tls is None
        self._data = b""
        self._timer = self._loop.call_later(OPENING_S, self.close)

    def start(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._advance)

    def close(self) -> None:
        """Close without an answer: none is owed to a stranger."""
        self._let_go()
        self._sock.close()

    def _let_go(self) -> None:
        self._timer.cancel()
        self._server.forget(self)
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())

    def _advance(self) -> None:
        try:
            if isinstance(self._sock, ssl.SSLSocket) and not self._is_shaken:
                self._loop.remove_writer(self._sock.fileno())
                self._sock.do_handshake()
                self._is_shaken = True
            more = self._sock.recv(streams.OPENING_BYTES - len(self._data))
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self._sock.fileno(), self._advance)
            return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            self.close()
            return
        self._data += more
        if not more:
            self.close()
        elif len(self._data) == streams.OPENING_BYTES:
            self._let_go()
            try:
                self._server.open(self._sock, self._data)
            except ParamdError as error:
                self._server.refuse(self._sock, error)
        elif isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            self._advance()  # decrypted already: the socket will not become readable for it


def _make_blocking(sock: socket.socket) -> None:
    """Let the kernel wait, without the interpreter's lock, and give up on a stalled peer."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(STALL_S)
        return
    sock.setblocking(True)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", STALL_S, 0))


def _part_of(offset: int, data: memoryview) -> Part:
    source = ctypes.addressof(ctypes.c_char.from_buffer(data))

    def fill(address: int, begin: int, size: int) -> None:
        ctypes.memmove(address, source + begin, size)

    return offset, len(data), fill


def _exactly(sock: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, part: memoryview) -> None:
    done = 0
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    while done < len(part):
        moved = sock.recv_into(part[done:], len(part) - done, flags)
        if not moved:
            raise ConnectionError("the sender has left")
        done += moved


def _drain(sock: socket.socket) -> None:
    """Read what still arrives after the answer, which closing at once could destroy."""
    socket.socket.shutdown(sock, socket.SHUT_WR)
    until_s = time.monotonic() + DRAIN_S
    rest = bytearray(1 << 16)
    while time.monotonic() < until_s and socket.socket.recv_into(sock, rest):
        pass


def _send_windows(stream: _Stream, data: memoryview, at_point: Callable[[str], None]) -> None:
    opening, sock = stream.opening, stream.sock
    # Header and bytes in one segment, if the socket supports that.
    more = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_MORE
    for begin in range(opening.begin, opening.end, streams.WINDOW_BYTES):
        part = data[begin : min(begin + streams.WINDOW_BYTES, opening.end)]
        xxh3 = checksum_of(part, begin) if opening.checksums else 0
        # All of it: after a part of a header, the following bytes would be read as a header.
        sock.sendall(streams.Window(streams.DATA, begin, len(part), xxh3).packed(), more)
        sock.sendall(part)
        at_point("stream-window")


def _hang_up(sock: socket.socket) -> None:
    """Wake the stream's thread from any wait; its socket is closed afterwards."""
    with suppress(OSError):
        # Undelivered bytes help nobody, and a stalled reader would keep their memory allocated.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        # Not SSLSocket's method, which would drop its TLS state under the sending thread.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
