"""Bulk streams of a real sidecar: the very bytes of a snapshot, for who was granted them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from paramd import streams
from paramd.cli.main import main
from paramd.errors import DeniedError, NotFoundError, ParamdError, UsageError
from paramd.security.tickets import Role
from paramd.streams import DATA, FAILED, LAST, Opening
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import checksum_of
from tests.integration.client_job import halves, running_job
from tests.integration.fake_trainer import FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import (
    Client,
    SidecarProcess,
    client_of,
    sidecar,
    values_of,
    wait_until,
)
from tests.integration.test_revocation import WITHIN_S, User

ARENA_BYTES = 24 << 20
"""More than the buffers of a connection whose reader has stalled."""
SMALL_BUFFER_BYTES = 16 << 10
TIMEOUT_S = 30.0
BESIEGERS = 4
MOST_GROWTH_BYTES = 16 << 20


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SidecarProcess]:
    # Memory that is no longer held is not kept for long, so that it shows.
    with sidecar(tmp_path / "s", "--idle-memory-s", "0.2") as started:
        yield started


@pytest.fixture
def trainer(trainer: FakeTrainer) -> FakeTrainer:
    trainer.settings.update_s = 0.0
    trainer.update()
    return trainer


def granted(client: Client, snapshot_id: str) -> pb.GrantStreamResponse:
    found = client.call("GrantStream", pb.GrantStreamRequest(snapshot_id=snapshot_id))
    assert isinstance(found, pb.GrantStreamResponse)
    assert found.port
    assert len(found.grant_id) == streams.ID_BYTES
    assert len(found.secret) == streams.SECRET_BYTES
    assert 0 < found.valid_ms <= 60_000
    return found


class Stream:
    """A connection to a port for streams."""

    def __init__(
        self,
        grant: pb.GrantStreamResponse,
        begin: int,
        end: int,
        *,
        checksums: bool = False,
        sealed: bytes | None = None,
        buffer_bytes: int = 0,
    ) -> None:
        self.secret = grant.secret
        self.opening = Opening(grant.grant_id, begin, end, checksums)
        self.sealed = sealed if sealed is not None else self.opening.sealed(self.secret)
        self.socket = socket.socket()
        if buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(("127.0.0.1", grant.port))
        self.socket.sendall(self.sealed)

    def exactly(self, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            part = self.socket.recv(size_bytes - len(data), socket.MSG_WAITALL)
            if not part:
                raise EOFError
            data += part
        return data

    def accepted(self) -> Stream:
        """Read the reply. Raises the refusal."""
        reply = self.exactly(streams.REPLY_BYTES)
        status, size = streams.read_reply(reply, self.sealed, self.secret)
        if status:
            raise streams.error_of(status, self.exactly(size))
        return self

    def read(self) -> bytes:
        """All bytes, up to a good last word. Raises what a FAILED window tells of."""
        found, offset = bytearray(), self.opening.begin
        while True:
            window = streams.read_window(self.exactly(streams.WINDOW_HEADER_BYTES))
            data = self.exactly(window.size)
            if window.kind == FAILED:
                raise streams.error_of(window.xxh3, data)
            if window.kind == LAST:
                assert window.offset == offset == self.opening.end
                assert self.socket.recv(1) == b"", "nothing follows"
                return bytes(found)
            assert (window.kind, window.offset) == (DATA, offset)
            expected = checksum_of(memoryview(data), offset) if self.opening.checksums else 0
            assert window.xxh3 == expected
            offset += window.size
            found += data

    def ends(self) -> bool:
        """Whether it ended without a last word, once its reader goes on."""
        try:
            self.read()
        except (EOFError, ConnectionError):
            return True
        except NotFoundError:
            return True
        return False

    def close(self) -> None:
        self.socket.close()


def whole(client: Client, snapshot_id: str, begin: int = 0, end: int = ARENA_BYTES) -> bytes:
    with closing(Stream(granted(client, snapshot_id), begin, end)) as stream:
        return stream.accepted().read()


def refusal(stream: Stream) -> ParamdError:
    with closing(stream), pytest.raises(ParamdError) as found:
        stream.accepted()
    return found.value


def used_bytes(client: Client) -> int:
    return int(client.state().state.snapshot_bytes)


RANGES = [
    (0, ARENA_BYTES),
    (0, 1),
    (ARENA_BYTES - 1, ARENA_BYTES),
    (streams.WINDOW_BYTES - 1, streams.WINDOW_BYTES + 1),
    (12345, 2 * streams.WINDOW_BYTES + 777),
    (0, 0),
    (ARENA_BYTES, ARENA_BYTES),
]


def test_a_stream_brings_the_bytes_that_read_snapshot_brings(
    trainer: FakeTrainer, client: Client
) -> None:
    # Bytes that differ everywhere, so that a wrong place shows.
    words = trainer.arena.buffer[:ARENA_BYTES].cast("q")
    for index in range(0, len(words), 509):
        words[index] = index
    words.release()
    pin = client.pin()
    expected = client.read(pin.snapshot_id)
    assert len(expected) == ARENA_BYTES
    for begin, end in RANGES:
        for checksums in (False, True):
            grant = granted(client, pin.snapshot_id)
            assert grant.header.step == pin.header.step
            with closing(Stream(grant, begin, end, checksums=checksums)) as stream:
                assert stream.accepted().read() == expected[begin:end], (begin, end)


def test_a_grant_is_good_for_one_stream(client: Client) -> None:
    grant = granted(client, client.pin().snapshot_id)
    with closing(Stream(grant, 0, 100)) as stream:
        assert len(stream.accepted().read()) == 100
    error = refusal(Stream(grant, 0, 100))
    assert isinstance(error, DeniedError)
    assert "unknown, used or too old" in str(error)


def test_who_does_not_know_the_secret_is_refused_and_leaves_the_grant_good(client: Client) -> None:
    grant = granted(client, client.pin().snapshot_id)
    sealed = Opening(grant.grant_id, 0, 100).sealed(grant.secret)
    other_range = Opening(grant.grant_id, 0, 200).sealed(grant.secret)[:-32] + sealed[-32:]
    other_end = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for forged in (other_range, other_end, Opening(grant.grant_id, 0, 1).sealed(bytes(32))):
        error = refusal(Stream(grant, 0, 100, sealed=forged))
        assert isinstance(error, DeniedError)
        assert "not made with its grant's secret" in str(error)
    with closing(Stream(grant, 0, 100)) as stream:
        assert len(stream.accepted().read()) == 100


def test_a_range_outside_of_the_snapshot_is_refused(client: Client) -> None:
    pin = client.pin()
    for begin, end in (0, ARENA_BYTES + 1), (ARENA_BYTES + 1, ARENA_BYTES + 1), (0, 2**64 - 1):
        error = refusal(Stream(granted(client, pin.snapshot_id), begin, end))
        assert isinstance(error, UsageError)
        assert "expected a range within" in str(error)


def test_a_grant_of_a_snapshot_that_is_released_or_not_filled_is_refused(
    trainer: FakeTrainer, client: Client
) -> None:
    pin = client.pin()
    grant = granted(client, pin.snapshot_id)
    client.release(pin.snapshot_id)
    assert isinstance(refusal(Stream(grant, 0, 1)), NotFoundError)
    with client_of(trainer, Role.CONTROL) as control:
        prepared = control.pin(at_boundary=True)
        for other, why in ((pin, "no such snapshot"), (prepared, "schedule a boundary first")):
            with pytest.raises(grpc.RpcError, match=why):
                granted(control, other.snapshot_id)


def stalled(client: Client, snapshot_id: str) -> Stream:
    """A stream whose reader takes nothing but the reply; the sidecar is blocked in sending."""
    stream = Stream(granted(client, snapshot_id), 0, ARENA_BYTES, buffer_bytes=SMALL_BUFFER_BYTES)
    return stream.accepted()


def test_a_lease_that_ends_ends_the_stream_of_a_stalled_reader_and_frees_its_memory(
    trainer: FakeTrainer, client: Client
) -> None:
    before, pin = used_bytes(client), client.pin(lease_ms=400)
    with closing(stalled(client, pin.snapshot_id)) as stream:
        assert used_bytes(client) > before
        # Long before it would be ended for taking nothing.
        wait_until(lambda: used_bytes(client) == before, "the memory is given back", 30.0)
        trainer.update()
        assert stream.ends(), "what was sent is no answer"


def test_an_ended_incarnation_ends_its_streams(
    process: SidecarProcess, trainer: FakeTrainer, client: Client
) -> None:
    pin = client.pin()
    grant = granted(client, pin.snapshot_id)
    with closing(stalled(client, pin.snapshot_id)) as stream:
        handed = attach(
            process.socket_path, TrainerSettings(arena_bytes=ARENA_BYTES, incarnation=2)
        )
        try:
            handed.send_mesh()
            assert stream.ends()
            assert isinstance(refusal(Stream(grant, 0, 1)), NotFoundError)
        finally:
            handed.close()


def test_stalled_readers_stop_nobody_and_cost_no_memory(
    process: SidecarProcess, trainer: FakeTrainer, client: Client
) -> None:
    rss, pin = psutil.Process(process.process.pid).memory_info, client.pin()
    assert values_of(whole(client, pin.snapshot_id)) == {1}
    with ExitStack() as stack:
        stack.enter_context(closing(stalled(client, pin.snapshot_id)))
        before = rss().rss
        for _ in range(20):
            stack.enter_context(closing(stalled(client, pin.snapshot_id)))
        for _ in range(3):
            assert values_of(whole(client, pin.snapshot_id)) == {1}
            assert client.read(pin.snapshot_id, 0, 8)
            trainer.update()
        assert rss().rss - before < MOST_GROWTH_BYTES
    client.release(pin.snapshot_id)
    wait_until(lambda: used_bytes(client) == 0, "all memory is given back", 3.0)


@pytest.mark.in_turns
def test_a_thousand_strangers_stop_nobody_and_leave_nothing(
    process: SidecarProcess, client: Client
) -> None:
    pin = client.pin()
    port = granted(client, pin.snapshot_id).port
    sidecar_ = psutil.Process(process.process.pid)
    before, before_rss = sidecar_.num_fds(), sidecar_.memory_info().rss
    ended = threading.Event()

    def besiege(first: int) -> None:
        held: list[socket.socket] = []
        for number in range(first, 1000, BESIEGERS):
            one = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
            with suppress(OSError):
                one.sendall(b"x" * (number % (streams.OPENING_BYTES + 2)))
            held.append(one)
            if len(held) > 50:
                held.pop(0).close()
        ended.wait(TIMEOUT_S)
        for one in held:
            one.close()

    with ThreadPoolExecutor(BESIEGERS) as pool:
        besieging = [pool.submit(besiege, first) for first in range(BESIEGERS)]
        served = 0
        try:
            while not all(one.done() for one in besieging) and served < 20:
                with suppress(EOFError, ConnectionError):
                    # Pushed out by later strangers it is asked again, as a reader does.
                    assert len(whole(client, pin.snapshot_id, 0, 1 << 20)) == 1 << 20
                    served += 1
                assert client.state()
        finally:
            ended.set()
        for one in besieging:
            one.result()
    assert served
    wait_until(lambda: sidecar_.num_fds() <= before + 3, "descriptors are given back")
    assert sidecar_.memory_info().rss - before_rss < MOST_GROWTH_BYTES
    assert len(whole(client, pin.snapshot_id)) == ARENA_BYTES


def test_unused_grants_are_bounded_and_forgotten(client: Client, trainer: FakeTrainer) -> None:
    pin = client.pin()
    with ThreadPoolExecutor(16) as pool:  # at once: a grant is forgotten after ten seconds
        asked = [pool.submit(granted, client, pin.snapshot_id) for _ in range(2000)]
    refused: Any = next(filter(None, (one.exception() for one in asked)))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "grants of streams" in refused.details()


def test_a_drained_sidecar_ends_its_streams_and_leaves_in_time(
    process: SidecarProcess, trainer: FakeTrainer, client: Client
) -> None:
    pin = client.pin()
    with closing(stalled(client, pin.snapshot_id)) as stream:
        assert process.terminate() == 0
        assert stream.ends()


def test_a_revoked_token_ends_its_stream_while_another_goes_on() -> None:
    with running_job(halves(ARENA_BYTES // 4)) as job, ExitStack() as stack:
        doomed, other = User(job, "doomed", stack), User(job, "other", stack)
        running = {user.name: _running(user, stack) for user in (doomed, other)}
        unused = _granted(doomed)
        assert main(("token", "revoke", "doomed")) == 0
        revoked_s = time.monotonic()
        assert _hung_up(running["doomed"].socket, revoked_s + WITHIN_S)
        assert running["doomed"].ends()
        assert isinstance(refusal(Stream(unused, 0, 1)), DeniedError)
        assert len(running["other"].read()) == ARENA_BYTES


def _granted(user: User) -> pb.GrantStreamResponse:
    wanted = user.pin()
    wanted.spans[0].end = ARENA_BYTES
    pinned = user.call(0, "PinSnapshot", wanted).result()
    request = pb.GrantStreamRequest(snapshot_id=pinned.snapshot_id)
    found = user.call(0, "GrantStream", request).result()
    assert isinstance(found, pb.GrantStreamResponse)
    return found


def _running(user: User, stack: ExitStack) -> Stream:
    stream = Stream(_granted(user), 0, ARENA_BYTES, buffer_bytes=SMALL_BUFFER_BYTES)
    return stack.enter_context(closing(stream)).accepted()


def _hung_up(sock: socket.socket, until_s: float) -> bool:
    """Whether the peer shuts its side, without taking what it sent: TCP_INFO shows the state."""
    while time.monotonic() < until_s:
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state != 1:  # ESTABLISHED
            return True
        time.sleep(0.01)
    return False
