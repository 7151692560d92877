"""A read resumes, checks, and gives up in time."""

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest

from paramd.errors import AbortedError, ConflictError, DataLossError, UnreachableError
from paramd.mesh.reading import stream as reading
from paramd.mesh.reading.places import Place, PlaceSink
from paramd.mesh.reading.stream import Expected, Reader
from paramd.state import StateName
from paramd.v1 import common_pb2, sidecar_pb2
from paramd.wire import Chunk, checksum_of, parse_chunk

SNAPSHOT = bytes(i % 251 for i in range(1000))
CHUNK_BYTES = 100


def status(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "told")


def chunk_at(offset: int, data: bytes) -> Chunk:
    message = sidecar_pb2.ReadSnapshotResponse(
        data=data, xxh3=checksum_of(data, offset), offset_bytes=offset
    )
    return parse_chunk(message.SerializeToString())


class Source:
    """Serves SNAPSHOT; `mishap(stream, offset)` may raise, or replace a chunk."""

    who = "rank 0"

    def __init__(self, mishap: Callable[[int, int], Chunk | None] = lambda s, o: None) -> None:
        self.mishap = mishap
        self.begins: list[int] = []
        self.step, self.edits = 5, 2
        self.hangs_at: int | None = None
        self.hanging_streams = 1000
        self.headless_streams = 0
        self.probes: list[Exception | None] = []
        self.probed = 0

    async def chunks(self, offset_bytes: int, timeout_s: float) -> AsyncIterator[Chunk]:
        self.begins.append(offset_bytes)
        header = common_pb2.Header(incarnation=1, step=self.step, edits=self.edits)
        if len(self.begins) > self.headless_streams:
            yield parse_chunk(sidecar_pb2.ReadSnapshotResponse(header=header).SerializeToString())
        for offset in range(offset_bytes, len(SNAPSHOT), CHUNK_BYTES):
            if offset == self.hangs_at and len(self.begins) <= self.hanging_streams:
                await asyncio.Event().wait()
            replaced = self.mishap(len(self.begins), offset)
            data = SNAPSHOT[offset : offset + CHUNK_BYTES]
            yield replaced if replaced is not None else chunk_at(offset, data)
        self.mishap(len(self.begins), len(SNAPSHOT))

    async def probe(self) -> None:
        self.probed += 1
        error = self.probes.pop(0) if self.probes else None
        if error is not None:
            raise error


async def run(source: Source, seconds: float = 30) -> bytes:
    """What landed."""
    target = bytearray(len(SNAPSHOT))
    at = ctypes.addressof(ctypes.c_char.from_buffer(target))
    sink = PlaceSink([Place(0, len(target), at)])
    expected = Expected(StateName(1, 0, 5, 2), len(SNAPSHOT))
    await Reader(source, sink, expected).run(time.monotonic() + seconds)
    return bytes(target)


async def test_bytes_that_stay_wrong_are_data_loss() -> None:
    def skip(stream: int, offset: int) -> Chunk | None:
        return chunk_at(offset + 1, SNAPSHOT[offset : offset + 10]) if offset == 500 else None

    with pytest.raises(DataLossError, match="from 500 on"):
        await run(Source(skip))


async def test_bytes_under_another_offset_are_asked_for_again_and_then_data_loss() -> None:
    """Two chunks of one size with their offsets exchanged join up, and are in the wrong place."""

    def exchanged(times: int) -> Callable[[int, int], Chunk | None]:
        def mishap(stream: int, offset: int) -> Chunk | None:
            other = {500: 600, 600: 500}.get(offset)
            if other is None or stream > times:
                return None
            good = chunk_at(other, SNAPSHOT[other : other + CHUNK_BYTES])
            return Chunk(good.message, good.begin, good.end, good.xxh3, offset)

        return mishap

    source = Source(exchanged(1))
    assert await run(source) == SNAPSHOT
    assert source.begins == [0, 500]
    with pytest.raises(DataLossError, match="offset 500 do not match"):
        await run(Source(exchanged(100)))


async def test_a_stream_without_a_header_is_a_broken_answer() -> None:
    source = Source()
    source.headless_streams = 1
    assert await run(source) == SNAPSHOT
    assert source.begins == [0, 0]
    source.headless_streams = 100
    with pytest.raises(DataLossError, match="rank 0: its stream began without a header"):
        await run(source)


async def test_bytes_of_another_step_are_refused() -> None:
    source = Source()
    for source.step, source.edits in ((6, 2), (5, 3)):
        told = rf"step {source.step} with {source.edits} edits.*the pin is of step 5 with 2 edits"
        with pytest.raises(ConflictError, match=told):
            await run(source)


async def test_an_error_after_the_last_byte_is_raised() -> None:
    """The sidecar's last word: these bytes do not hold."""

    def changed(stream: int, offset: int) -> None:
        if offset == len(SNAPSHOT):
            raise status(grpc.StatusCode.ABORTED)

    source = Source(changed)
    with pytest.raises(AbortedError, match="told"):
        await run(source)
    assert source.begins == [0]


async def test_a_stream_that_breaks_after_the_last_byte_is_asked_for_its_last_word() -> None:
    def drop(stream: int, offset: int) -> None:
        if offset == len(SNAPSHOT) and stream <= 2:
            raise status(grpc.StatusCode.UNAVAILABLE)

    source = Source(drop)
    assert await run(source) == SNAPSHOT
    assert source.begins == [0, 1000, 1000]


async def test_a_hanging_stream_is_probed_and_a_dead_peer_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_LOOK_S", 0.01)
    monkeypatch.setattr(reading, "_PROBE_AFTER_S", 0.02)
    source = Source()
    source.hangs_at = 400
    source.probes = [None, UnreachableError("stopped")]
    before = asyncio.all_tasks()
    with pytest.raises(UnreachableError, match="stopped"):
        await run(source)
    assert source.probed == 2
    assert asyncio.all_tasks() == before
