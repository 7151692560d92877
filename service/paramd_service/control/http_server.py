"""REST's server: uvicorn in our event loop, on a listener that is ours before it starts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from paramd.errors import UnreachableError
from paramd_service.tls import ServerTls

CONCURRENCY = 128


class _Uvicorn(uvicorn.Server):
    """Signals are the whole process's business, not its."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """`start`, `stop`; on one event loop."""

    def __init__(self, *, drain_s: float) -> None:
        """No I/O. `drain_s` is how long requests under way may take when it stops."""
        self._drain_s = drain_s
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: FastAPI, listener: socket.socket, *, tls: ServerTls | None) -> None:
        """Returns when it answers.

        Raises:
            UnreachableError: it ended at once.
        """
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            # Ours in guard.py leaves the query out.
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONCURRENCY,
            timeout_graceful_shutdown=max(1, round(self._drain_s)),
        )
        config.load()
        # In place of what uvicorn makes of files once and for all.
        config.ssl = tls.ssl_context() if tls is not None else None
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="paramd-http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise UnreachableError("REST did not start; its log says why")
            await asyncio.sleep(0.002)

    async def stop(self) -> None:
        """Answers what it has begun, and ends. Safe after a failed start."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait({self._task})
