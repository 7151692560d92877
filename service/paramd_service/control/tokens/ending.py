"""Streams of REST end when their token does: a request is only looked at when it begins."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_GONE: Message = {"type": "http.disconnect"}


async def run_until(
    ended: asyncio.Future[None], app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Runs `app`. Once `ended` is done, it is as if its caller had hung up, and the answer
    ends in order there; what is no stream has been answered before it could notice.
    """
    open_answer = False

    async def send_noting(message: Message) -> None:
        nonlocal open_answer
        await send(message)
        open_answer = message["type"] == "http.response.start" or message.get("more_body", False)

    async def receive_or_end() -> Message:
        coming = asyncio.ensure_future(receive())
        try:
            either: set[asyncio.Future[Any]] = {coming, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else _GONE
        finally:
            coming.cancel()

    await app(scope, receive_or_end, send_noting)
    if open_answer and ended.done():
        await send({"type": "http.response.body", "body": b"", "more_body": False})
