"""What is reached through the control plane, and how bytes get there."""

from __future__ import annotations

import asyncio

import pytest

from paramd.errors import DeniedError, NotFoundError, UnreachableError
from paramd.mesh.peers.control import RestClient


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            b'HTTP/1.1 404 Not Found\r\ncontent-length: 20\r\n\r\n{"detail": "no rank"}',
            NotFoundError,
        ),
        (b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n", DeniedError),
        (b"HTTP/1.1 503 Busy\r\n\r\n", UnreachableError),
        (b"220 smtp.example\r\n\r\n", UnreachableError),
        (b"\x00" * 20_000, UnreachableError),
        (b"", UnreachableError),
    ],
)
async def test_anything_but_a_tunnel_is_an_error_of_ours(
    answer: bytes, error: type[Exception]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = RestClient(f"http://127.0.0.1:{port}", "token")
        with pytest.raises(error):
            await client.tunnel("/jobs/run/ranks/0/tunnel")
        await client.close()
