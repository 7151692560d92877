"""Time limits of REST's connections, on a real socket with shorter limits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI, Request, Response

from paramd_service.control import http_server
from paramd_service.control.access.doorway import Doorway
from paramd_service.control.base.endpoint import Address, open_listener
from paramd_service.control.http_server import SECURITY_HEADERS, HttpServer

LIMIT_S = 0.3
PATIENCE_S = 60.0
LARGE_BYTES = 16 << 20
POST = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Of a server whose `/until` answers once a connection without a request has been closed."""
    for name in ("HEAD_S", "BODY_S"):
        monkeypatch.setattr(http_server, name, LIMIT_S)
    app = FastAPI()

    @app.post("/body")
    async def take(request: Request) -> str:
        return (await request.body()).decode()

    @app.get("/until")
    async def until(port: int) -> str:
        async with asyncio.timeout(PATIENCE_S), connected(port) as (reader, _):
            assert await reader.read() == b""
        return "closed"

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * LARGE_BYTES)

    listener, _ = open_listener(Address("127.0.0.1", 0))
    server = HttpServer(Doorway())
    await server.start(app, [listener], tls=None)
    try:
        yield listener.getsockname()[1]
    finally:
        await server.stop(1.0)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def hung_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What the server says before it hangs up on who sends a byte now and then."""
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ConnectionError, TimeoutError):
                more = await asyncio.wait_for(reader.read(4096), LIMIT_S / 4)
                if not more:
                    return found
                found += more
                continue
            if reader.at_eof() or reader.exception() is not None:
                return found
            writer.write(b"x")


async def test_a_body_that_trickles_is_not_waited_for(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(POST.replace(b"length: 4", b"length: 4000"))
        assert await hung_up(reader, writer) == b""


async def test_a_request_that_takes_longer_than_its_head_may_is_answered(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(f"GET /until?port={port} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 200 ")


async def test_the_next_requests_head_has_the_same_limit_as_the_first(port: int) -> None:
    async with connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(POST + b"body")
            await asyncio.wait_for(reader.readuntil(b'"body"'), PATIENCE_S)
        writer.write(b"GET /until HTTP/1.1\r\nx-slow: ")
        assert await hung_up(reader, writer) == b""


@pytest.mark.parametrize("sent", [b"no http\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n"])
async def test_what_is_no_request_is_answered_with_the_headers_of_all(
    port: int, sent: bytes
) -> None:
    async with connected(port) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(sent)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert all(name + b": " + value in answer for name, value in SECURITY_HEADERS)


@pytest.mark.parametrize("ending", ["keep-alive", "close"])
@pytest.mark.parametrize("reads", [True, False])
async def test_a_large_answer_is_sent_for_as_long_as_it_is_read(
    port: int, ending: str, reads: bool
) -> None:
    async with connected(port) as (reader, writer):
        writer.write(f"GET /large HTTP/1.1\r\nhost: x\r\nconnection: {ending}\r\n\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        size_bytes = 0
        await asyncio.sleep(0 if reads else 3 * LIMIT_S)
        with contextlib.suppress(ConnectionError):
            while size_bytes < LARGE_BYTES and (count := len(await reader.read(1 << 20))):
                size_bytes += count
                await asyncio.sleep(LIMIT_S / 8 if reads else 0)
    assert (size_bytes == LARGE_BYTES) is reads


@pytest.mark.parametrize(("before", "left", "ends"), [(9e5, 8e5, 0), (9e5, 9e5 - 9, 1), (9, 0, 1)])
def test_a_trickle_keeps_no_connection(before: float, left: float, ends: int) -> None:
    peer: Any = MagicMock()
    peer._socket.get_write_buffer_size.return_value = left
    http_server.Connection._late(peer, before)
    assert (peer.shut.call_count, peer._await_head.call_count) == (ends, 1 - ends)
