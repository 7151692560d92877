"""A bulk stream fills the right places with the right bytes, resumes, and gives up in time."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd import errors, streams
from paramd.errors import AbortedError, ConflictError, DataLossError, DeadlineError, ParamdError
from paramd.mesh.peers import bulk
from paramd.mesh.peers.sidecars import Pinned, RankPin, StreamOffer
from paramd.mesh.reading import places as placing
from paramd.mesh.reading import stream as reading
from paramd.mesh.reading.places import Place, PlaceSink, Scratch
from paramd.mesh.reading.stream import Expected, NoStreamError, Reading, StreamReader, read_range
from paramd.state import StateName
from paramd.streams import DATA, FAILED, LAST, Grant, Opening, Window
from paramd.v1 import common_pb2, sidecar_pb2
from paramd.wire import Chunk, checksum_of, data_chunk, parse_chunk

SNAPSHOT = bytes(i % 251 for i in range(1000))
WINDOW_BYTES = 100
GRANT = Grant(bytes(16), bytes(32))
HANG_S = 20.0


class FarOffer(StreamOffer):
    """An offer of another host, whose windows carry checksums."""

    leaves_host = property(lambda self: True)  # type: ignore[assignment]


def window(offset: int, data: bytes, *, bad: bool = False) -> bytes:
    """A window of data; a bad one's last bit is flipped after its checksum was made."""
    header = Window(DATA, offset, len(data), checksum_of(memoryview(data), offset)).packed()
    return header + (data[:-1] + bytes([data[-1] ^ 1]) if bad else data)


def last(offset: int = len(SNAPSHOT)) -> bytes:
    return Window(LAST, offset, 0).packed()


def windows(opening: Opening) -> Iterator[bytes]:
    """What a good sidecar sends, after its reply."""
    for begin in range(opening.begin, opening.end, WINDOW_BYTES):
        yield window(begin, SNAPSHOT[begin : min(begin + WINDOW_BYTES, opening.end)])
    yield last(opening.end)


def accepted(sealed: bytes, secret: bytes = GRANT.secret) -> bytes:
    return streams.reply(sealed, secret)


Answers = Callable[[int, bytes], Iterator[bytes]]
"""(number of the stream, its opening) -> what is sent."""


def good(_number: int, sealed: bytes) -> Iterator[bytes]:
    yield accepted(sealed)
    yield from windows(streams.read_opening(sealed))


class Port:
    """A port for streams on this host, where a script answers."""

    def __init__(self, answers: Answers = good) -> None:
        self.answers = answers
        self.begins: list[int] = []
        self.ended = threading.Event()
        """Set when the test ends: what hangs goes on."""
        self.flaws: list[BaseException] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.number = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self.ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        assert not self.flaws

    def hang(self) -> Iterator[bytes]:
        yield b""
        self.ended.wait(HANG_S)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(HANG_S)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        sealed = b""
        while len(sealed) < streams.OPENING_BYTES:
            part = connection.recv(streams.OPENING_BYTES - len(sealed))
            if not part:
                return
            sealed += part
        try:
            opening = streams.read_opening(sealed)
            opening.check(sealed, GRANT.secret)
        except ParamdError as error:
            self.flaws.append(error)
            return
        self.begins.append(opening.begin)
        for part in self.answers(len(self.begins), sealed):
            connection.sendall(part)


@contextmanager
def port(answers: Answers = good) -> Iterator[Port]:
    found = Port(answers)
    try:
        yield found
    finally:
        found.close()


class Source:
    """Offers streams at a port; gRPC serves SNAPSHOT as well."""

    who = "rank 0"

    def __init__(self, number: int, *, far: bool = False) -> None:
        self.port, self.far = number, far
        self.step, self.edits = 5, 2
        self.offered = self.probed = 0
        self.read_over_grpc: list[int] = []

    def header(self) -> common_pb2.Header:
        return common_pb2.Header(incarnation=1, step=self.step, edits=self.edits)

    async def offer(self) -> StreamOffer:
        self.offered += 1
        kind = FarOffer if self.far else StreamOffer
        return kind(GRANT, self.header(), "127.0.0.1", self.port, None)

    async def probe(self) -> None:
        self.probed += 1

    async def chunks(self, offset_bytes: int, timeout_s: float) -> AsyncIterator[Chunk]:
        self.read_over_grpc.append(offset_bytes)
        header = sidecar_pb2.ReadSnapshotResponse(header=self.header())
        yield parse_chunk(header.SerializeToString())
        if offset_bytes < len(SNAPSHOT):
            data = memoryview(SNAPSHOT)[offset_bytes:]
            yield parse_chunk(bytes(data_chunk(data, offset_bytes)))


class Target:
    """Memory that a read fills, in one place."""

    def __init__(self, size_bytes: int = len(SNAPSHOT)) -> None:
        self.memory = (ctypes.c_char * size_bytes)()
        self.sink = PlaceSink([Place(0, size_bytes, ctypes.addressof(self.memory))])

    @property
    def data(self) -> bytes:
        return self.memory.raw


EXPECTED = Expected(StateName(1, 0, 5, 2), len(SNAPSHOT))


async def run(source: Source, seconds: float = 30, target: Target | None = None) -> bytes:
    target = target if target is not None else Target()
    await StreamReader(source, target.sink, EXPECTED).run(time.monotonic() + seconds)
    return target.data


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and pauses as short as a test wants them; places are received directly."""
    monkeypatch.setattr(reading, "_LOOK_S", 0.01)
    monkeypatch.setattr(bulk, "LOOK_S", 0.01)
    monkeypatch.setattr(reading, "_PROBE_AFTER_S", 0.02)
    monkeypatch.setattr(placing, "DIRECT_BYTES", 16)


async def test_a_flipped_bit_is_asked_for_again() -> None:
    def flip(number: int, sealed: bytes) -> Iterator[bytes]:
        yield accepted(sealed)
        for part in windows(opening := streams.read_opening(sealed)):
            at = streams.read_window(part[: streams.WINDOW_HEADER_BYTES]).offset
            bad = number == 1 and at == 500 and opening.checksums
            yield window(at, SNAPSHOT[at : at + WINDOW_BYTES], bad=True) if bad else part

    with port(flip) as at:
        assert await run(Source(at.number, far=True)) == SNAPSHOT
    assert at.begins == [0, 500]


async def test_bits_that_stay_flipped_are_data_loss() -> None:
    def flip(_number: int, sealed: bytes) -> Iterator[bytes]:
        yield accepted(sealed)
        yield window(0, SNAPSHOT[:100], bad=True)

    with port(flip) as at:
        with pytest.raises(DataLossError, match="rank 0: 100 bytes at offset 0 do not match"):
            await run(Source(at.number, far=True))
        assert at.begins == [0] * (reading.MAX_FAILURES + 1)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("cut_bytes", [0, 10, 24, 25, 70])
async def test_a_stream_cut_within_a_window_is_resumed_at_the_first_missing_byte(
    cut_bytes: int, far: bool
) -> None:
    def cut(number: int, sealed: bytes) -> Iterator[bytes]:
        yield accepted(sealed)
        opening = streams.read_opening(sealed)
        for count, part in enumerate(windows(opening)):
            if number <= 3 and count == 3:
                yield part[:cut_bytes]
                return
            yield part

    with port(cut) as at:
        assert await run(Source(at.number, far=far)) == SNAPSHOT
    assert at.begins == [0, 300, 600, 900]


WRONG: dict[str, list[bytes]] = {
    "another offset": [window(100, SNAPSHOT[100:200])],
    "beyond the end": [window(0, SNAPSHOT), window(1000, b"x")],
    "across the end": [window(0, SNAPSHOT + b"x")],
    "the same window twice": [window(0, SNAPSHOT[:100]), window(0, SNAPSHOT[:100])],
    "the last word too early": [window(0, SNAPSHOT[:100]), last()],
    "a last word of fewer bytes": [window(0, SNAPSHOT[:100]), last(100)],
    "a window without bytes": [Window(DATA, 0, 0).packed()],
    "a window of too many": [Window(DATA, 0, streams.WINDOW_BYTES + 1).packed()],
    "a last word with bytes": [Window(LAST, 1000, 1).packed() + b"x"],
    "an unknown kind": [Window(3, 0, 0).packed()],
    "an error of too many words": [Window(FAILED, 0, streams.MAX_TEXT_BYTES + 1).packed()],
}


@pytest.mark.parametrize("parts", WRONG.values(), ids=WRONG)
async def test_a_stream_that_is_not_what_was_asked_for_is_data_loss(parts: list[bytes]) -> None:
    def wrong(_number: int, sealed: bytes) -> Iterator[bytes]:
        yield accepted(sealed)
        yield from parts

    target = Target()
    with port(wrong) as at, pytest.raises(DataLossError, match="rank 0"):
        await run(Source(at.number), target=target)
    assert all(found in (0, wanted) for found, wanted in zip(target.data, SNAPSHOT, strict=True))


@pytest.mark.parametrize(
    "reply",
    [
        lambda sealed: accepted(sealed, bytes(31) + b"x"),
        lambda sealed: accepted(b"another opening"),
        lambda sealed: b"HTTP/1.1 400 Bad Request\r\n" + bytes(100),
        lambda sealed: bytes(streams.REPLY_BYTES),
    ],
    ids=["another secret", "another opening", "another protocol", "zeros"],
)
async def test_another_program_at_the_port_is_refused(reply: Callable[[bytes], bytes]) -> None:
    def other(_number: int, sealed: bytes) -> Iterator[bytes]:
        yield reply(sealed)
        yield from windows(streams.read_opening(sealed))

    target = Target()
    with port(other) as at, pytest.raises(NoStreamError, match="the process at the sidecar's"):
        await run(Source(at.number), target=target)
    assert target.data == bytes(len(SNAPSHOT)), "nothing of what it sent was written"


@pytest.mark.parametrize("kind", [AbortedError, ConflictError, errors.DeniedError])
async def test_an_error_after_all_bytes_is_raised(kind: type[ParamdError]) -> None:
    """The bytes came, but did not hold: they must not be taken for an answer."""

    def fail(_number: int, sealed: bytes) -> Iterator[bytes]:
        yield accepted(sealed)
        yield from [*windows(streams.read_opening(sealed))][:-1]
        yield streams.failure(kind("changed while it was read"))

    with port(fail) as at, pytest.raises(kind, match="rank 0: changed while"):
        await run(Source(at.number))
    assert at.begins == [0]


async def test_bytes_of_another_state_are_refused_before_a_port_is_asked() -> None:
    with port() as at:
        source = Source(at.number)
        source.edits = 3
        with pytest.raises(ConflictError, match="step 5 with 3 edits"):
            await run(source)
        source.step, source.edits = 6, 2
        with pytest.raises(ConflictError, match="step 6"):
            await run(source)
    assert at.begins == []


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Peers:
    """What `read_range` needs of Sidecars."""

    def __init__(self, source: Source) -> None:
        self.one = source
        self.kept: list[int] = []

    def source(self, pin: RankPin, *, end_bytes: int = 0) -> Source:
        assert end_bytes == len(SNAPSHOT)
        return self.one

    def has_streams(self, rank: int) -> bool:
        return rank not in self.kept

    def keep_to_grpc(self, rank: int) -> None:
        self.kept.append(rank)


async def read_all(source: Source, transport: Any) -> tuple[bytes, Peers]:
    pins: Any = {0: None}
    pinned = Pinned(StateName(1, 0, 5, 2), pins)
    target, peers = Target(), Peers(source)
    deadline_s = time.monotonic() + 30
    sidecars: Any = peers
    reading = Reading(sidecars, pinned, deadline_s, transport)
    await read_range(reading, 0, target.sink, 0, len(SNAPSHOT))
    return target.data, peers


async def test_auto_falls_back_to_grpc_and_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "STREAM_FROM_BYTES", 1)
    source = Source(closed_port())
    data, peers = await read_all(source, "auto")
    assert data == SNAPSHOT
    assert (source.read_over_grpc, peers.kept) == ([0], [0])
    with pytest.raises(NoStreamError):
        await read_all(source, "stream")


async def test_what_a_stream_brought_before_its_port_closed_is_proven_over_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All bytes without the last word are not an answer: gRPC must be asked for it."""
    monkeypatch.setattr(reading, "STREAM_FROM_BYTES", 1)

    def all_but_the_proof(number: int, sealed: bytes) -> Iterator[bytes]:
        at._listener.shutdown(socket.SHUT_RDWR)
        at._listener.close()
        yield accepted(sealed)
        yield from [*windows(streams.read_opening(sealed))][:-1]

    with port(all_but_the_proof) as at:
        source = Source(at.number)
        data, _ = await read_all(source, "auto")
    assert data == SNAPSHOT
    assert source.read_over_grpc == [len(SNAPSHOT)], "the proof was asked for"


async def test_a_stalled_stream_of_a_living_peer_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "LIVENESS_S", 0.1)
    with port() as at:
        at.answers = lambda number, sealed: stalled(at, number, sealed)
        source, target = Source(at.number), Target()
        reader = StreamReader(source, target.sink, EXPECTED)
        running = asyncio.ensure_future(reader.run(time.monotonic() + 30))
        # One at a time answers here: the first must be told to go on.
        while source.offered < 2:
            await asyncio.sleep(0.005)
        at.ended.set()
        await running
    assert target.data == SNAPSHOT
    assert at.begins == [0, 400]
    assert source.probed


def stalled(at: Port, number: int, sealed: bytes) -> Iterator[bytes]:
    """Stops after 400 bytes, in the first stream."""
    yield accepted(sealed)
    sent = [*windows(streams.read_opening(sealed))]
    yield from sent[: 4 if number == 1 else None]
    if number == 1:
        yield from at.hang()


async def test_the_callers_deadline_ends_a_read() -> None:
    with port() as at:
        at.answers = lambda number, sealed: stalled(at, number, sealed)
        with pytest.raises(DeadlineError, match="400 of 1,000"):
            await run(Source(at.number), seconds=0.05)


async def test_a_cancelled_read_leaves_no_thread_that_writes() -> None:
    with port() as at:
        at.answers = lambda number, sealed: stalled(at, number, sealed)
        target = Target()
        running = asyncio.ensure_future(run(Source(at.number), target=target))
        while not target.data.startswith(SNAPSHOT[:400]):
            await asyncio.sleep(0.005)
        assert stream_threads()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        no_stream_thread()
        before = target.data
        at.answers = good
        at.ended.set()
    assert target.data == before


async def test_a_read_cancelled_twice_still_waits_for_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second must not cut short the wait that the first began."""
    told, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert told.wait(HANG_S)
        ended.set()

    running = asyncio.ensure_future(reading.on_thread(work, lambda: None))
    for _ in range(3):
        await asyncio.sleep(0)
        running.cancel()
    await asyncio.sleep(0.01)
    assert not running.done()
    told.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


def stream_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "paramd-stream"]


def no_stream_thread() -> None:
    """A thread that has said its last word takes a moment to end."""
    for thread in stream_threads():
        thread.join(0.5)
    assert not stream_threads()


@dataclass
class Landed:
    """Places in memory of their own, or passed to a `store`, and what came there."""

    places: list[Place]
    found: dict[int, Any]
    stored: list[int]

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, bool]]) -> Landed:
        made = cls([], {}, [])
        for number, (begin, end, stores) in enumerate(sorted(spans, key=lambda one: one[0])):
            if stores:
                made.places.append(Place(begin, end, store=made._store(number, end - begin)))
                continue
            memory = (ctypes.c_char * (end - begin))()
            made.found[number] = memory
            made.places.append(Place(begin, end, ctypes.addressof(memory)))
        return made

    def _store(self, number: int, size_bytes: int) -> Callable[[int], None]:
        def store(address: int) -> None:
            self.stored.append(number)
            self.found[number] = ctypes.string_at(address, size_bytes)

        return store

    def check(self) -> None:
        for number, place in enumerate(self.places):
            found = self.found[number]
            data = found if isinstance(found, bytes) else found.raw
            assert data == SNAPSHOT[place.begin : place.end], place
        assert len(self.stored) == len(set(self.stored)), "stored twice"


class Feed:
    """Stands for a `BulkStream`: gives the bytes of one window, perhaps not all, or wrong ones."""

    def __init__(self, scratch: Scratch, at: int, *, cut: int = -1, flip: bool = False) -> None:
        self.scratch, self.checksums = scratch, True
        self._at, self._left, self._flip = at, cut, flip

    def fill(self, part: memoryview) -> None:
        data = SNAPSHOT[self._at : self._at + len(part)]
        if self._flip:
            data, self._flip = bytes([data[0] ^ 1]) + data[1:], False
        if 0 <= self._left < len(part):
            part[: self._left] = data[: self._left]
            raise EOFError
        part[:] = data
        self._at += len(part)
        self._left -= len(part) if self._left >= 0 else 0


def spans_of(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int, bool]]:
    begins = st.integers(0, len(SNAPSHOT) - 1)
    return st.builds(
        lambda begin, size, stores: (begin, min(begin + size, len(SNAPSHOT)), stores),
        begins,
        sizes,
        st.sampled_from([False, False, True]),
    )


SPANS = st.lists(spans_of(st.integers(1, 400)), max_size=12)
ADJOINING = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=30)


def adjoining(sizes: Sequence[tuple[int, bool]]) -> list[tuple[int, int, bool]]:
    """Places one after the other, as tensors lie in a snapshot."""
    found, begin = [], 0
    for size, stores in sizes:
        if begin + size <= len(SNAPSHOT):
            found.append((begin, begin + size, stores))
            begin += size
    return found


@given(
    spans=st.one_of(SPANS, ADJOINING.map(adjoining)),
    steps=st.lists(
        st.tuples(st.integers(1, 500), st.sampled_from(["", "", "cut", "flip"]), st.integers(0)),
        max_size=12,
    ),
)
def test_places_get_what_writes_alone_give_them_whatever_breaks(
    spans: list[tuple[int, int, bool]], steps: list[tuple[int, str, int]]
) -> None:
    by_write, by_stream = Landed.of(spans), Landed.of(spans)
    whole = (ctypes.c_char * len(SNAPSHOT)).from_buffer_copy(SNAPSHOT)
    PlaceSink(by_write.places).write(0, ctypes.addressof(whole), len(SNAPSHOT))
    by_write.check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "DIRECT_BYTES", 16)
        take(by_stream, steps)
    by_stream.check()


def take(landed: Landed, steps: list[tuple[int, str, int]]) -> None:
    source: Any = None
    reader = StreamReader(source, PlaceSink(landed.places), EXPECTED)
    scratch, left = Scratch(), list(steps)
    while (begin := reader.offset_bytes) < len(SNAPSHOT):
        size, mishap, nth = left.pop(0) if left else (len(SNAPSHOT), "", 0)
        size = min(size, len(SNAPSHOT) - begin)
        data = memoryview(SNAPSHOT)[begin : begin + size]
        asked = Window(DATA, begin, size, checksum_of(data, begin))
        feed: Any = Feed(
            scratch, begin, cut=nth % size if mishap == "cut" else -1, flip=mishap == "flip"
        )
        try:
            reader._take(asked, feed, scratch)
        except (EOFError, DataLossError):
            assert mishap
            assert reader.offset_bytes == begin
            continue
        assert not mishap
