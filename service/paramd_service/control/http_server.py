"""REST server: uvicorn on our event loop, with a listener that we opened beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from paramd.errors import UnreachableError
from paramd_service.control.access.doorway import Doorway, Upstream
from paramd_service.tls import ServerTls

HEAD_S: Final = 10.0
"""Time limit for a request's head, and before that for the TLS handshake."""

SWITCHING: Final = (
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: paramd-tunnel\r\n\r\n"
)

BODY_S: Final = 30.0
"""Time limit for the whole body, after the head."""


class _Connection(H11Protocol):
    """uvicorn's connection plus time limits: on its own it waits forever for a silent peer."""

    def __init__(self, doorway: Doorway, **options: Any) -> None:
        super().__init__(**options)
        self._doorway = doorway
        self._awaits: tuple[object, float] | None = None
        self._early = b""
        self._timer: asyncio.TimerHandle | None = None
        self._upstream: Upstream | None = None
        """The far end, once this connection is a tunnel."""

    @property
    def address(self) -> tuple[str, int]:
        """The peer's host and port."""
        assert self.client is not None
        return self.client

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def shut(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is None:
            transport.abort()  # the peer is already gone
            return
        self._doorway.opened(self)
        self._await_peer()
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        if self.client is None:
            return  # `connection_made` never completed
        if self._timer is not None:
            self._timer.cancel()
        self._doorway.closed(self)
        if self._upstream is not None:
            self._upstream.close()
        super().connection_lost(exc)

    def carry(self, upstream: Upstream) -> None:
        """See `Carrier`."""
        # uvicorn sees an answer that has begun and never sends another one.
        self.cycle.response_started = True
        self._upstream = upstream
        self.transport.write(SWITCHING)
        early, _ = self.conn.trailing_data
        if early:
            upstream.write(early)
        self.flow.resume_reading()
        upstream.start()

    def shutdown(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._upstream is not None:
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._upstream is not None:
            self._upstream.resume_reading()

    def _should_upgrade(self) -> bool:
        # The routes decide, without uvicorn's warnings about WebSockets.
        return False

    def data_received(self, data: bytes) -> None:
        if self._upstream is not None:
            self._upstream.write(data)
            return
        if self.client is None:
            # Data that arrived with the end of the TLS handshake, before `connection_made`.
            self._early += data
            return
        super().data_received(data)
        self._await_peer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_peer()

    def _await_peer(self) -> None:
        """Arm the time limit for what the peer owes. Trickling bytes does not extend it."""
        awaits: tuple[object, float] | None = (self.cycle, HEAD_S)
        if self.is_busy:
            awaits = (self.cycle, BODY_S) if self.cycle.more_body else None
        if awaits == self._awaits:
            return
        self._awaits = awaits
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaits is not None and not self.transport.is_closing():
            self._timer = self.loop.call_later(awaits[1], self.shut)


class _Handshake(asyncio.Protocol):
    """A connection during the TLS handshake: a stranger, for at most `HEAD_S`."""

    is_busy = False

    def __init__(
        self, doorway: Doorway, context: ssl.SSLContext, then: Callable[[], _Connection]
    ) -> None:
        self.address = ("", 0)
        self._doorway = doorway
        self._context = context
        self._then = then
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        if not peer:
            transport.abort()
            return
        self.address = (str(peer[0]), int(peer[1]))
        self._transport = transport
        transport.pause_reading()
        self._doorway.opened(self)
        self._task = asyncio.get_running_loop().create_task(self._shake(transport))

    def shut(self) -> None:
        """Close the connection at once."""
        assert self._transport is not None
        self._transport.abort()

    async def _shake(self, transport: asyncio.Transport) -> None:
        connection = self._then()
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport,
                connection,
                self._context,
                server_side=True,
                ssl_handshake_timeout=HEAD_S,
            )
        except (OSError, ssl.SSLError):  # strangers may send anything
            transport.abort()
            return
        finally:
            self._doorway.closed(self)
        if secure is not None and not transport.is_closing():
            connection.connection_made(secure)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server with our connections; leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, doorway: Doorway, tls: ServerTls | None) -> None:
        super().__init__(config)
        self._doorway = doorway
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, but with our connection class."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        context = self._tls.ssl_context() if self._tls is not None else None

        def accept() -> asyncio.BaseProtocol:
            if context is None:
                return self._connection()
            return _Handshake(self._doorway, context, self._connection)

        self.servers = [
            await loop.create_server(accept, sock=one, backlog=self.config.backlog)
            for one in sockets or ()
        ]
        self.started = True

    def _connection(self) -> _Connection:
        return _Connection(
            self._doorway,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


class HttpServer:
    """Life cycle: `start`, `stop`. Single event loop."""

    def __init__(self, doorway: Doorway, *, drain_s: float) -> None:
        """No I/O. `drain_s` is the time for requests in progress to finish at `stop`."""
        self._doorway = doorway
        self._drain_s = drain_s
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: FastAPI, listener: socket.socket, *, tls: ServerTls | None) -> None:
        """Start serving; return once it accepts connections.

        Raises:
            UnreachableError: it ended at once.
        """
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            # The app logs requests itself, without the query, which may contain secrets.
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(self._drain_s)),
        )
        config.load()
        self._server = _Uvicorn(config, self._doorway, tls)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="paramd-http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise UnreachableError("the REST server did not start; see the log for the reason")
            await asyncio.sleep(0.002)

    async def stop(self) -> None:
        """Finish requests in progress and stop. Safe after a failed start."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait({self._task})
