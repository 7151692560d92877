"""Peers, stores and files that say more than is read of them, or say it for ever."""

import asyncio
import gzip
import json
import os
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest

from paramd import bounds
from paramd.answers import (
    NOT_PACKED,
    asked,
    asked_once,
    has_over,
    parsed_json,
    read_file,
    said,
    unpacked,
)
from paramd.bounds import Bound, OverBoundError
from paramd.errors import DataLossError, UnreachableError
from paramd.mesh.peers.control import RestClient
from paramd.security.tls import open_channel
from paramd.v1 import sidecar_pb2 as pb
from paramd.v1 import sidecar_pb2_grpc

SMALL = Bound(what="a test", most_bytes=1000, within_s=0.2, parts=100)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"

Says = Callable[[asyncio.StreamWriter], Any]


@asynccontextmanager
async def server_of(says: Says) -> AsyncIterator[str]:
    """The URL of a server that says the same to everybody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await says(writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n[")
    while True:
        writer.write(b"1," * 500_000)
        await writer.drain()


async def trickling(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"content-length: 900\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def trickling_head(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    while True:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def packed(writer: asyncio.StreamWriter) -> None:
    data = gzip.compress(b" " * (1 << 20))
    writer.write(HEAD + f"content-encoding: gzip\r\ncontent-length: {len(data)}\r\n\r\n".encode())
    writer.write(data)
    await writer.drain()


@pytest.mark.parametrize("says", [endless, packed])
async def test_an_http_answer_over_its_bound_is_refused(says: Says) -> None:
    async with server_of(says) as url, httpx2.AsyncClient(headers=NOT_PACKED) as client:
        with pytest.raises(OverBoundError):
            await asked(client, "GET", url, SMALL, timeout_s=5.0)


@pytest.mark.parametrize("says", [trickling, trickling_head])
async def test_an_http_answer_that_trickles_ends(says: Says) -> None:
    async with server_of(says) as url, httpx2.AsyncClient(headers=NOT_PACKED) as client:
        with pytest.raises(TimeoutError):
            await asked(client, "GET", url, SMALL, timeout_s=0.2)


async def test_a_blocking_request_within_a_running_loop_is_bounded_too() -> None:
    async with server_of(endless) as url:
        with pytest.raises(OverBoundError):
            await asyncio.to_thread(
                asked_once, "GET", url, SMALL, timeout_s=5.0, transport=httpx2.AsyncHTTPTransport()
            )


async def test_a_control_plane_that_never_ends_is_no_control_plane() -> None:
    async with server_of(endless) as url:
        rest = RestClient(url, "token")
        try:
            with pytest.raises(UnreachableError, match="more than"):
                await rest.jobs()
        finally:
            await rest.close()


def test_a_document_of_many_parts_or_levels_is_refused() -> None:
    assert parsed_json(b"[1,2]", SMALL) == [1, 2]
    for text in (b"[" + b"1," * 300 + b"1]", b" " * 2000, b"[" * 900, "\ud800"):
        with pytest.raises(ValueError, match=r"a test|Expecting|surrogates"):
            parsed_json(text, SMALL)
    with pytest.raises(OverBoundError, match="deeply"):
        parsed_json(b"[" * 200_000, Bound(what="a test", most_bytes=1 << 20, parts=1 << 20))


def test_what_unpacks_to_more_than_its_bound_is_cut_and_refused() -> None:
    assert unpacked(zlib.compress(b"{}"), SMALL) == {}
    for data in (zlib.compress(b" " * (64 << 20)), b"no zlib"):
        with pytest.raises(ValueError, match=r"unpacked|Expecting"):
            unpacked(data, SMALL)


def test_a_file_is_read_within_its_bound_and_a_pipe_not_at_all(tmp_path: Path) -> None:
    plain, large, pipe = (tmp_path / name for name in ("plain", "large", "pipe"))
    plain.write_bytes(b"1" * 1000)
    large.write_bytes(b"1" * 1001)
    os.mkfifo(pipe)
    assert read_file(plain, SMALL) == b"1" * 1000
    for path in (large, pipe, Path("/dev/zero")):
        with pytest.raises(OverBoundError):
            read_file(path, SMALL)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import sys\nwhile True: sys.stdout.write('x' * 4096)", OverBoundError),
        ("import sys\nwhile True: sys.stderr.write('x' * 4096)", OverBoundError),
        ("import time\ntime.sleep(600)", TimeoutError),
    ],
)
def test_a_command_that_says_too_much_or_nothing_is_ended(
    program: str, error: type[Exception]
) -> None:
    bound = Bound(what="a test", most_bytes=1000, within_s=1.0 if error is TimeoutError else 60.0)
    with pytest.raises(error):
        said([sys.executable, "-c", program], bound, lambda _: None)


def test_a_command_is_heard_whole() -> None:
    bound = Bound(what="a test", most_bytes=1000, within_s=60.0)
    program = "import os; os.write(2, b'one\\ntwo\\xff'); print(7); raise SystemExit(3)"
    told: list[str] = []
    assert said([sys.executable, "-c", program], bound, told.append) == (3, b"7\n")
    assert told == ["one", "two\ufffd"]


def test_a_command_that_asks_is_heard_before_its_line_ends(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = f"import os; os.write(2, b'PIN: '); print(open({str(pipe)!r}).read())"
    bound = Bound(what="a test", most_bytes=1000, within_s=60.0)
    told: list[str] = []

    def answer(line: str) -> None:
        told.append(line)
        pipe.write_text("1234")

    assert said([sys.executable, "-c", program], bound, answer) == (0, b"1234\n")
    assert told == ["PIN: "]


def many_entries() -> bytes:
    """More fields than are read, two bytes each: an empty entry."""
    return b"\x0a\x00" * (bounds.GRPC_PARTS + 1)


def test_fields_are_counted_below_parts_that_have_one_of_each() -> None:
    """A frame has facts, and the facts have as many notes as a peer likes."""
    said = pb.StreamGradientsResponse()
    said.frame.facts.notes.extend([pb.GradientNote()] * 100)
    data = said.SerializeToString()
    assert has_over(pb.StreamGradientsResponse.DESCRIPTOR, data, 90)
    assert not has_over(pb.StreamGradientsResponse.DESCRIPTOR, data, 110)


@pytest.mark.parametrize(
    ("method", "answer", "why"),
    [
        ("GetMetrics", pb.GetMetricsResponse(text="x" * (2 << 20)).SerializeToString(), "bytes"),
        ("GetLogged", many_entries(), "parts"),
        ("GetState", b"\xff\xff", "no message"),
        ("FindControl", b"\x0a" + b"\x01" * 3, "no message"),
    ],
)
async def test_an_answer_over_grpc_that_cannot_be_read_is_an_error_of_the_call(
    method: str, answer: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def says(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return answer

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(says)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("paramd.v1.SidecarService", {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = (("grpc.max_receive_message_length", bounds.GRPC_ANSWER_BYTES),)
    channel = open_channel(f"127.0.0.1:{port}", options=options)
    try:
        stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
        request = getattr(pb, f"{method}Request")()
        found = await getattr(stub, method)(request, timeout=60)
        with pytest.raises(DataLossError, match=why):
            _ = found.header
    finally:
        await channel.close()
        await server.stop(None)
    assert not caplog.records, "gRPC logs a traceback for what a parser raises"


def test_the_manual_shows_every_bound() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    for one in bounds.TABLE:
        assert row_of(one) in page, f"docs/security.md lacks\n{row_of(one)}"


def row_of(bound: Bound) -> str:
    """A bound's row in the manual."""
    size = bound.most_bytes
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
    unit, name = next(one for one in units if size % one[0] == 0)
    within = f"{bound.within_s:g} s" if bound.within_s < float("inf") else ""
    return f"| {bound.what} | {size // unit:,} {name} | {within} |"


if __name__ == "__main__":
    print("\n".join(map(row_of, bounds.TABLE)))
    print(json.dumps(dict(bounds.ANSWER_BYTES)))
