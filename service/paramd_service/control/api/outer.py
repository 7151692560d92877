"""ASGI middleware: every request has an id, and a client that does not read is let go."""

from __future__ import annotations

import asyncio
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paramd.errors import METADATA_KEY, request_id

SEND_TIMEOUT_S = 20.0
"""How long a client may take no byte before its connection is ended."""

REQUEST_ID = METADATA_KEY.encode()

_RIGHT = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")


class RequestIdMiddleware:
    """Gives each request its own id, or keeps the caller's, and answers with it."""

    def __init__(self, app: ASGIApp, *, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._app = app
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        mine = _id_of(scope)
        token = request_id.set(mine.decode())

        async def send_in_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, mine)]
            # A slow reader must not hold a viewer's place, nor what its answer holds.
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            await self._app(scope, receive, send_in_time)
        except TimeoutError:
            return  # uvicorn closes the connection: the answer is not whole
        finally:
            request_id.reset(token)


def _id_of(scope: Scope) -> bytes:
    offered = [value for name, value in scope["headers"] if name == REQUEST_ID]
    if len(offered) == 1 and _RIGHT.match(offered[0]):
        found: bytes = offered[0]
        return found
    return secrets.token_hex(8).encode()
