"""The client's end of a tunnel: an HTTP request that turns into a connection to somewhere else."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

from paramd import bounds
from paramd.security import loopback

PROTOCOL = "paramd-tunnel"
"""The protocol that the connection is upgraded to: raw bytes."""

NEAR_S = 1.0
"""Seconds that a full backlog of the Unix socket may delay a connection."""

MAX_HEAD_BYTES = bounds.TUNNEL_HEAD.most_bytes
MAX_TEXT_BYTES = bounds.TUNNEL_TEXT.most_bytes


class RefusedError(Exception):
    """The server answered with something else than a tunnel."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.text = text


async def opened(
    url: str, path: str, token: str, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask the server at `url` for the tunnel at `path`; the caller sets the deadline.

    Raises RefusedError with status and text; StrangerError if somebody else listens there; without
    a connection, or HTTP, OSError, EOFError, ValueError or asyncio.LimitOverrunError.
    """
    parts = urlsplit(url)
    port = parts.port if parts.port is not None else (443 if context is not None else 80)
    near = loopback.connected_beside(url, NEAR_S)
    if near is not None:
        reader, writer = await asyncio.open_unix_connection(sock=near, limit=MAX_HEAD_BYTES)
    else:
        reader, writer = await asyncio.open_connection(
            parts.hostname, port, ssl=context, limit=MAX_HEAD_BYTES
        )
    try:
        await _known(url, token, reader, writer)
        head = (
            f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {token}\r\n"
            f"connection: upgrade\r\nupgrade: {PROTOCOL}\r\n\r\n"
        )
        writer.write(head.encode("latin-1"))
        await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(answer.split(" ", 2)[1])
        if status != 101:
            raise RefusedError(status, await _body(reader, answer))
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _known(
    url: str, token: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Raise StrangerError if this is no connection to send the token over."""
    connection = writer.get_extra_info("socket")
    asked = await asyncio.to_thread(loopback.question, url, token, connection)
    if asked is None:
        return
    try:
        writer.write(asked.head())
        head = await reader.readuntil(loopback.HEAD_END)
        body = await reader.readexactly(loopback.length_of(head))
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise asked.refusal() from error
    asked.check(head, body)


async def _body(reader: asyncio.StreamReader, head: str) -> str:
    """The text of a refusal; without a length, the part that has arrived."""
    length = 0
    for line in head.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length" and value.strip().isdigit():
            length = min(int(value), MAX_TEXT_BYTES)
    with suppress(asyncio.IncompleteReadError):
        return (await reader.readexactly(length)).decode(errors="replace")
    return ""
