"""REST server: uvicorn on the control plane's event loop, with a listener opened beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from paramd.accepting import AT_ONCE, Listener
from paramd.errors import DeniedError, UnreachableError
from paramd.memory.handover import check_peer
from paramd_service.control.access.doorway import DOOR, GONE, Doorway
from paramd_service.tls import ServerTls

HEAD_S: Final = 10.0
"""Time limit for a request's head, TLS handshake included. Trickling bytes does not extend it."""
BODY_S: Final = 30.0
"""Time limit for the whole body, after the head."""
LEAST_READ_BYTES: Final = 64 << 10
"""Minimum bytes that a peer must read of an answer per `HEAD_S`; a slower one is disconnected."""

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
"""On every response, unless the route set the header itself."""


class _Http(H11Protocol):
    """uvicorn's protocol, whose answer to what is no HTTP has the headers of every answer, too."""

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request, or a head longer than `h11_max_incomplete_event_size`, of
        which the app never hears, and hang up."""
        body = msg.encode()
        headers = (
            *SECURITY_HEADERS,
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        )
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + body)
        self.transport.close()


PIECE_BYTES: Final = 64 << 10
"""Writes from this size on are sent at once."""


class _Together(asyncio.Transport):
    """Sends in one piece what is written in one turn of the event loop: uvicorn writes the head and
    the body of an answer separately, and a system call and a packet for each cost more than all
    that is done for a short request."""

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self._inner = inner
        self._written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if len(data) >= PIECE_BYTES:
            self._send()
            self._inner.write(data)
            return
        if not self._written:
            asyncio.get_running_loop().call_soon(self._send)
        self._written.append(bytes(data))

    def _send(self) -> None:
        written, self._written = self._written, []
        if written and not self._inner.is_closing():
            self._inner.write(b"".join(written))

    def close(self) -> None:
        self._send()
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()


UNIX: Final = "unix"
"""The host of peers at a Unix socket."""


class Connection(asyncio.Protocol):
    """One connection of uvicorn's, with a place in the doorway and a time limit for heads: uvicorn
    waits forever for a silent peer, and asyncio a minute for a handshake.

    It calls uvicorn's protocol as asyncio does, and does not depend on its internals. A request
    finds its connection in `scope["state"]`, under `DOOR`.
    """

    def __init__(
        self,
        doorway: Doorway,
        context: ssl.SSLContext | None,
        *,
        app_state: dict[str, Any],
        **options: Any,
    ) -> None:
        """`app_state` and `options` are those of uvicorn's `Config(http=...)`."""
        self.host = ""
        """The peer's address."""
        self._doorway = doorway
        self._context = context
        self._http = _Http(app_state={**app_state, DOOR: self}, **options)
        self._inner: asyncio.Protocol = self._http
        """The protocol that takes the data: uvicorn's, or a tunnel's."""
        self._transport: asyncio.Transport
        self._socket: asyncio.Transport
        """Below TLS, whose own transport does not count what this one has yet to send."""
        self._early: bytes | None = b""
        """Data that arrived with the end of the TLS handshake; None once uvicorn takes it."""
        self._request_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = self._socket = transport
        self.host = _host_of(transport)
        if not self.host:
            transport.abort()
            return
        self._doorway.opened(self)
        self._await_head()
        if self._context is None:
            self._begin()
            return
        transport.pause_reading()
        self._handshake = asyncio.get_running_loop().create_task(self._shake(self._context))

    async def _shake(self, context: ssl.SSLContext) -> None:
        try:
            secure = await asyncio.get_running_loop().start_tls(
                self._transport, self, context, server_side=True, ssl_handshake_timeout=HEAD_S
            )
        except (OSError, ssl.SSLError):  # strangers may send anything
            secure = None
        if secure is None or secure.is_closing():
            self.shut()
            return
        self._transport = secure
        self._begin()

    def _begin(self) -> None:
        early, self._early = self._early, None
        self._http.connection_made(_Together(self._transport))
        if early:
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            return
        self._inner.data_received(data)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._doorway.closed(self)
        if self._early is None:
            self._http.connection_lost(exc)
        if self._inner is not self._http:
            self._inner.connection_lost(exc)

    def shut(self) -> None:
        """Close the connection at once."""
        # A failed handshake is followed by no `connection_lost`.
        self._stop_timer()
        self._doorway.closed(self)
        self._transport.abort()

    def carry(self, tunnel: asyncio.Protocol) -> asyncio.Transport:
        """Give the connection to `tunnel`, which must answer the current request. Data that the
        peer sent before the answer is lost."""
        self._inner = tunnel
        self._doorway.tunnels.add(self)
        # uvicorn may have stopped reading at the end of the head.
        self._transport.resume_reading()
        return self._transport

    def _await_head(self, unsent_bytes: float = math.inf) -> None:
        # Of a closing connection, too: nobody may read its last answer.
        self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._late, unsent_bytes)

    def _late(self, unsent_bytes: float) -> None:
        """Shut, unless the last answer is still being read."""
        left_bytes = self._socket.get_write_buffer_size()
        if 0 < left_bytes <= unsent_bytes - LEAST_READ_BYTES:
            self._await_head(left_bytes)
        else:
            self.shut()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for a request whose head has arrived."""
        self._stop_timer()
        self._doorway.works(self)
        self._request_count += 1
        ends_s: float | None = asyncio.get_running_loop().time() + BODY_S

        async def receive_in_time() -> Message:
            nonlocal ends_s
            try:
                async with asyncio.timeout_at(ends_s):
                    message = await receive()
            except TimeoutError:
                self.shut()
                return GONE
            if not message.get("more_body"):
                ends_s = None
            return message

        try:
            await app(scope, receive_in_time, send)
        finally:
            self._request_count -= 1
            # The next request may have begun while this one is cleaned up.
            if not self._request_count:
                self._doorway.waits(self)
                self._await_head()


def _host_of(transport: asyncio.Transport) -> str:
    """The peer's address; "unix" for our own user or root, who alone may call there. Empty for a
    peer that is gone already, or of another user."""
    connection = transport.get_extra_info("socket")
    if connection.family == socket.AF_UNIX:
        # The folder of the socket keeps others out. This holds for its descriptors, too.
        try:
            check_peer(connection)
        except (OSError, DeniedError):
            return ""
        return UNIX
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Life cycle: `start`, `stop`. Single event loop."""

    def __init__(self, doorway: Doorway) -> None:
        self._doorway = doorway
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, app: FastAPI, listeners: Sequence[Listener], *, tls: ServerTls | None
    ) -> None:
        """Return once it accepts connections.

        Raises:
            UnreachableError: If it ended at once.
        """
        for listener in listeners:
            listener.is_full = self._doorway.is_full
            listener.on_full = self._doorway.make_room
        context = tls.ssl_context() if tls is not None else None

        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            await scope["state"][DOOR].answer(app, scope, receive, send)

        config = uvicorn.Config(
            timed,
            http=partial(Connection, self._doorway, context),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            # Its warnings are about strangers' requests, and tunnels, which are no WebSockets.
            log_level="error",
            # The app logs requests itself, without the query, which may contain secrets.
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=AT_ONCE,
        )
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(
            self._server.serve(sockets=[*listeners]), name="paramd-http"
        )
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise UnreachableError("the REST server did not start; see the log for the reason")
            await asyncio.sleep(0.002)
        for listener in listeners:
            listener.keep_backlog()

    async def stop(self, drain_s: float) -> None:
        """Stop; requests have `drain_s` seconds, at least 1. Safe after a failed start."""
        for tunnel in list(self._doorway.tunnels):
            tunnel.shut()
        if self._server is not None and self._task is not None:
            self._server.config.timeout_graceful_shutdown = max(1, round(drain_s))
            self._server.should_exit = True
            await asyncio.wait({self._task})
