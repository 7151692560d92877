"""Doors under siege: whoever has no good token, or is greedy with one, costs nobody else theirs."""

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio
import httpx2
import psutil
import pytest

from paramd.memory import handover
from paramd.mesh.peers import tunnels
from paramd.security import authority
from paramd.security.tickets import Role
from paramd.security.tls import ClientTls
from paramd.v1 import control_pb2_grpc
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.admission import MAX_OPEN_CALLS
from paramd_service.control.grpc_server import MAX_STREAMS_OF_RANK
from paramd_service.control.records.events import MAX_VIEWERS
from paramd_service.sidecar.snapshots.store import MAX_LEASES
from tests.integration.control_process import (
    TOKEN,
    Control,
    FakeSidecar,
    control_plane,
    joined,
    schedule,
)
from tests.integration.control_process import ticket as control_ticket
from tests.integration.fake_trainer import FakeTrainer, attached
from tests.integration.sidecar_process import Client, client_of, sidecar, ticket, wait_until
from tests.longer import times

pytestmark = pytest.mark.usefixtures("grpc_is_up")

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
HALF_OPEN = 300
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 begins with: the preface, and settings that change nothing."""

SETTINGS_ACK = bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
HALF_REQUEST = b"GET /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        with control_plane("--empty-end-s", "900") as found:
            yield found


@contextlib.contextmanager
def half_open(url: str, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Connections without a token that have sent `data` and say no more."""
    at = urlsplit(url)
    assert at.hostname is not None
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection((at.hostname, at.port), timeout=5))
            one.sendall(data)
            found.append(one)
        yield found


def is_closed(one: socket.socket) -> bool:
    """Whether the other side has hung up; what it has sent is thrown away."""
    one.setblocking(False)
    try:
        while one.recv(1 << 16):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("data", [b"", HALF_REQUEST], ids=["idle", "half a request"])
def test_half_open_requests_lock_nobody_out(control: Control, data: bytes) -> None:
    with half_open(control.url, HALF_OPEN, data) as left:
        for number in range(20):
            assert control.get("/api/v1/jobs/run").status_code == 200
            assert number or not all(map(is_closed, left)), "it waited until they were ended"


CHURN = """
import socket
print("UP", flush=True)
while True:
    one = socket.socket()
    one.setblocking(False)
    try:
        one.connect(("127.0.0.1", PORT))
    except OSError:
        pass
    one.close()
"""


@contextlib.contextmanager
def churn(url: str) -> Iterator[subprocess.Popen[str]]:
    """A program that opens connections and drops them, as fast as it can."""
    code = CHURN.replace("PORT", str(urlsplit(url).port))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as found:
        try:
            assert found.stdout is not None
            assert found.stdout.readline() == "UP\n"
            yield found
        finally:
            found.kill()


def test_connections_that_are_dropped_at_once_lock_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 256 descriptors, and a place in the backlog for whoever asks."""
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    with control_plane("--empty-end-s", "900") as control:
        resource.prlimit(control.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        with churn(control.url) as flood:
            # Each over a connection of its own; with a backlog of 128 none was answered.
            for _ in range(5):
                assert control.get("/api/v1/jobs/run").status_code == 200
            assert flood.poll() is None
        with half_open(control.url, 200, HALF_REQUEST):
            for _ in range(5):
                assert control.get("/api/v1/jobs/run").status_code == 200
        assert control.process.poll() is None


@contextlib.contextmanager
def idle(address: str, *, settled: bool) -> Iterator[list[socket.socket]]:
    """Connections to a gRPC server that never speak, or that say who they are and no more."""
    with half_open(f"//{address}", HALF_OPEN, HTTP2 if settled else b"") as found:
        for one in found if settled else ():
            assert one.recv(1 << 16)[3] == 4, "the server's settings come first"
            one.sendall(SETTINGS_ACK)
        yield found


IDLE = pytest.mark.parametrize("settled", [False, True], ids=["silent", "settled"])


@IDLE
def test_idle_connections_keep_no_sidecar_out_of_the_control_plane(
    control: Control, settled: bool
) -> None:
    with idle(control.grpc_address, settled=settled) as left:
        for number in range(3):
            asyncio.run(_joins(control))
            assert number or not all(map(is_closed, left)), "it waited until they were ended"
        # Neither settings nor an answer to a ping came: they are not kept.
        wait_until(lambda: all(map(is_closed, left)), "idle connections are ended", timeout_s=25)


@IDLE
def test_idle_connections_keep_nobody_out_of_a_sidecar(tmp_path: Path, settled: bool) -> None:
    """Also not when it was started with fewer descriptors than there are connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (HALF_OPEN, hard))
    with contextlib.ExitStack() as stack:
        try:
            trainer = stack.enter_context(served(tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stack.enter_context(idle(trainer.address, settled=settled))
        for _ in range(3):
            with holder_of(trainer, TOKENS[0]) as client:
                assert client.pin((0, 64)).snapshot_id


@pytest.mark.in_turns
def test_half_open_handshakes_lock_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.write(tmp_path / "certs", names=["localhost", "127.0.0.1"], days=1)
    for name, file in (("CERT", "server.pem"), ("KEY", "server.key"), ("CA", "ca.pem")):
        monkeypatch.setenv(f"PARAMD_TLS_{name}", str(tmp_path / "certs" / file))
    verify = ClientTls(ca=tmp_path / "certs" / "ca.pem").ssl_context()
    with control_plane() as control, half_open(control.url, HALF_OPEN, b"\x16\x03") as left:
        for _ in range(5):
            assert control.ask("GET", "/jobs/run", verify=verify).status_code == 200
        wait_until(lambda: all(map(is_closed, left)), "handshakes are ended", timeout_s=25)


async def test_a_tunnel_carries_bytes_until_its_token_is_revoked(control: Control) -> None:
    path = "/api/v1/jobs/run/tunnel"
    token = control.new_token("reader", name="tunnels")
    reader, writer = await tunnels.opened(control.url, path, token, None)
    with contextlib.closing(writer):
        writer.write(HTTP2)
        # Settings of the control plane's gRPC: through the tunnel its server speaks.
        assert (await asyncio.wait_for(reader.readexactly(9), 60))[3] == 4
        assert control.ask("DELETE", "/tokens/tunnels").status_code == 200
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)
    with pytest.raises(tunnels.RefusedError, match="401"):
        await tunnels.opened(control.url, path, token, None)


async def test_no_tunnel_leads_where_a_rank_only_says_that_it_is(control: Control) -> None:
    """A rank that was taken over names a service of this host, which is no sidecar of its."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        writer.close()

    victim = await asyncio.start_server(serve, "127.0.0.1", 0)
    sidecar, path = FakeSidecar(0), "/api/v1/jobs/run/ranks/0/tunnel"
    port = victim.sockets[0].getsockname()[1]
    for address, status in (
        (f"127.0.0.1:{port}", "503"),
        ("169.254.169.254:80", "503"),
        ("192.0.2.1:80", "503"),
    ):
        sidecar.address = address
        async with joined(control, sidecar):
            with pytest.raises(tunnels.RefusedError, match=status):
                await asyncio.wait_for(tunnels.opened(control.url, path, TOKEN, None), 60)
    victim.close()
    # It was asked whether it is the sidecar, over HTTP/2, and has told nobody anything.
    assert all(data.startswith(b"PRI * HTTP/2.0") for data in heard)


def test_metadata_of_strangers_beyond_a_tickets_size_is_refused_with_the_limit(
    control: Control, tmp_path: Path
) -> None:
    with served(tmp_path) as trainer:
        for address in (control.grpc_address, trainer.address):
            with grpc.insecure_channel(address) as channel:
                call = channel.unary_unary("/paramd.v1.SidecarService/GetState")
                with pytest.raises(grpc.RpcError, match="metadata size exceeds") as caught:
                    call(b"", timeout=10, metadata=(("x-large", "x" * (5 << 10)),))
                assert caught.value.code() is EXHAUSTED
                assert "4096" in str(caught.value)


async def test_a_tunnel_ends_with_either_side_and_with_the_control_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    path = "/api/v1/jobs/run/tunnel"
    with control_plane("--empty-end-s", "900") as control:
        _, writer = await tunnels.opened(control.url, path, TOKEN, None)
        writer.close()
        reader, writer = await tunnels.opened(control.url, path, TOKEN, None)
        writer.write(b"this is no HTTP/2, so gRPC hangs up\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
        reader, writer = await tunnels.opened(control.url, path, TOKEN, None)
        control.process.terminate()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert control.wait(20) == 0
        assert "ASGI" not in control.log.read_text()


TOKENS = ("a" * 16, "b" * 16)
ARENA_BYTES = 1 << 20


@contextlib.contextmanager
def served(tmp_path: Path, *options: str) -> Iterator[FakeTrainer]:
    """A trainer with its sidecar."""
    with (
        sidecar(tmp_path / "s", *options) as process,
        attached(process.socket_path, arena_bytes=ARENA_BYTES) as trainer,
    ):
        yield trainer


@contextlib.contextmanager
def holder_of(
    trainer: FakeTrainer, token_id: str | None, *more: tuple[str, str], role: Role = Role.READER
) -> Iterator[Client]:
    """A client with a ticket of one token, or of none."""
    with client_of(trainer) as client:
        text = ticket(role, token_id=token_id)
        client.metadata = (("authorization", f"Bearer {text}"), *more)  # type: ignore[assignment]
        yield client


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        found = error.code()
        assert isinstance(found, grpc.StatusCode)
        return found
    return grpc.StatusCode.OK


def test_two_long_pins_of_a_reader_leave_room_for_all_others(tmp_path: Path) -> None:
    with (
        served(tmp_path) as trainer,
        holder_of(trainer, TOKENS[0]) as greedy,
        holder_of(trainer, TOKENS[1]) as other,
        holder_of(trainer, None, role=Role.CONTROL) as control,
    ):
        greedy.pin(lease_ms=300_000)
        trainer.update()
        assert code_of(lambda: greedy.pin(lease_ms=300_000)) is EXHAUSTED
        mine = other.pin(lease_ms=300_000)
        trainer.update()
        control.pin(lease_ms=300_000)
        # What others hold already costs no memory: it is charged to the holder alone.
        other.release(mine.snapshot_id)
        trainer.update()
        other.pin(lease_ms=300_000)


def test_whom_the_control_plane_asks_for_is_charged(tmp_path: Path) -> None:
    told = ("x-paramd-asked-by", TOKENS[0])
    with (
        served(tmp_path) as trainer,
        holder_of(trainer, None, told, role=Role.CONTROL) as asked_for,
        holder_of(trainer, TOKENS[1], told) as liar,
        holder_of(trainer, TOKENS[0]) as holder,
    ):
        first = asked_for.pin(lease_ms=300_000)
        trainer.update()
        for client in (asked_for, holder):
            assert code_of(client.pin) is EXHAUSTED
        assert code_of(lambda: liar.release(first.snapshot_id)) is (
            grpc.StatusCode.PERMISSION_DENIED
        )
        holder.release(first.snapshot_id)
        liar.pin()
        holder.pin()


def test_one_reader_does_not_take_all_leases(tmp_path: Path) -> None:
    with (
        served(tmp_path) as trainer,
        holder_of(trainer, TOKENS[0]) as greedy,
        holder_of(trainer, TOKENS[1]) as other,
    ):
        taken = 0
        with contextlib.suppress(grpc.RpcError):
            for _ in range(MAX_LEASES):
                greedy.pin((0, 64), lease_ms=300_000)
                taken += 1
        assert MAX_LEASES // 4 < taken < MAX_LEASES // 2
        assert other.pin((0, 64)).snapshot_id


def test_slow_calls_of_one_reader_do_not_take_all_places(tmp_path: Path) -> None:
    with (
        served(tmp_path, "--max-calls", "8") as trainer,
        holder_of(trainer, TOKENS[0]) as greedy,
        holder_of(trainer, TOKENS[1]) as other,
    ):
        pin = greedy.pin()
        # Nobody reads what they answer: each waits for its reader and keeps its place.
        request = pb.ReadSnapshotRequest(snapshot_id=pin.snapshot_id)
        with slow_reads(trainer, greedy, request, 8):
            wait_until(
                lambda: code_of(lambda: greedy.read(pin.snapshot_id, 0, 8)) is EXHAUSTED,
                "the reader has its share",
            )
            assert other.pin((0, 64)).snapshot_id


@contextlib.contextmanager
def slow_reads(
    trainer: FakeTrainer, client: Client, request: pb.ReadSnapshotRequest, count: int
) -> Iterator[None]:
    """Reads that nobody takes anything of, over windows too small for them."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.lookahead_bytes", 64),
        ("grpc.http2.bdp_probe", 0),
    ]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            channel = stack.enter_context(grpc.insecure_channel(trainer.address, options))
            read = channel.unary_stream(
                "/paramd.v1.SidecarService/ReadSnapshot",
                request_serializer=pb.ReadSnapshotRequest.SerializeToString,
            )
            call = read(request, timeout=60, metadata=client.metadata)
            stack.callback(call.cancel)
        yield


def test_strangers_at_the_socket_make_place_for_others(tmp_path: Path) -> None:
    path = tmp_path / "s" / "rank-0.sock"
    with served(tmp_path) as trainer, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.callback(handover.connect(path, timeout_s=10).close)
        last = handover.connect(path, timeout_s=10)
        stack.callback(last.close)
        for _ in range(2):
            handover.send(last, {"op": "map", "ticket": ticket(), "snapshot_id": "x"})
            answer, _ = handover.receive(last)
            assert answer["code"] == "NOT_FOUND"
            # It has shown a ticket: from now on no stranger takes its place.
            for _ in range(100):
                stack.callback(handover.connect(path, timeout_s=10).close)
        trainer.update()
        trainer.finish()


def test_health_watches_of_strangers_leave_room_for_sidecars(control: Control) -> None:
    with contextlib.ExitStack() as stack:
        refused = 0
        for _ in range(3):
            channel = stack.enter_context(
                grpc.insecure_channel(control.grpc_address, [("grpc.use_local_subchannel_pool", 1)])
            )
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            for _ in range(100):
                call = watch(b"", timeout=60)
                stack.callback(call.cancel)
                refused += code_of(lambda call=call: next(call)) is EXHAUSTED
        assert refused == 300 - MAX_OPEN_CALLS
        asyncio.run(_joins(control))


async def _joins(control: Control) -> None:
    one = FakeSidecar(1, address="127.0.0.1:1")
    async with joined(control, one):
        assert one.welcome is not None
        assert (await schedule_refused(control)) is grpc.StatusCode.UNAVAILABLE


async def schedule_refused(control: Control) -> grpc.StatusCode:
    """A boundary is asked for and refused, since a rank is missing: the call is served."""
    try:
        await schedule(control, (0, "x"))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_join_streams_of_one_rank_are_few(control: Control) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_STREAMS_OF_RANK):
            one = FakeSidecar(0, address="127.0.0.1:1")
            await stack.enter_async_context(joined(control, one))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(control.grpc_address))
        stub = control_pb2_grpc.ControlServiceStub(channel)
        call = stub.Join(metadata=control_ticket(Role.SIDECAR, rank=0))
        assert await call.code() is EXHAUSTED


RESETS = times(4_000, 100_000)
"""Streams that are opened and cancelled at once, of each server."""

MOST_GROWTH_BYTES = 32 << 20


def test_viewers_of_one_token_leave_room_for_others(control: Control) -> None:
    greedy, other = control.new_token("viewer"), control.new_token("viewer")
    path = f"{control.url}/api/v1/jobs/run/events"

    def status(token: str, stack: contextlib.ExitStack) -> int:
        headers = {"authorization": f"Bearer {token}"}
        client = stack.enter_context(httpx2.Client(trust_env=False))
        return stack.enter_context(client.stream("GET", path, headers=headers)).status_code

    with contextlib.ExitStack() as stack:
        found = [status(greedy, stack) for _ in range(MAX_VIEWERS)]
        assert set(found) == {200, 429}
        assert found.count(200) < MAX_VIEWERS // 2
        for token in (other, TOKEN):
            assert status(token, stack) == 200


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One of HTTP/2."""
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def header_block(path: str, text: str) -> bytes:
    """Headers of a gRPC call with a ticket, each a literal that no table keeps."""
    named = {":authority": "x", ":path": path, "te": "trailers", "content-type": "application/grpc"}
    named |= {"authorization": f"Bearer {text}"} if text else {}

    def sized(value: str) -> bytes:
        head = (
            [len(value)]
            if len(value) < 127
            else [127, len(value) - 127 & 127 | 128, len(value) - 127 >> 7]
        )
        return bytes(head) + value.encode()

    literals = (b"\0" + sized(name) + sized(value) for name, value in named.items())
    return bytes([0x83, 0x86]) + b"".join(literals)


def reset_rapidly(address: str, blocks: list[bytes], count: int) -> int:
    """Opens so many streams and cancels each at once; how many connections that took."""
    connections, sent = 0, 0
    while sent < count:
        connections += 1
        with (
            half_open(f"//{address}", 1, HTTP2 + SETTINGS_ACK) as (one,),
            contextlib.suppress(OSError),
        ):
            # What the server says is read and thrown away, else it would wait for us.
            reader = threading.Thread(target=drained, args=(one,))
            reader.start()
            try:
                for stream in range(1, 2 * (count - sent), 2):
                    block = blocks[sent % len(blocks)]
                    opened = frame(1, 0x05, stream, block)
                    one.sendall(opened + frame(3, 0, stream, (8).to_bytes(4, "big")))
                    sent += 1
            finally:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                reader.join()
    return connections


def drained(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while one.recv(1 << 16):
            pass


def besieged(pid: int, attack: Callable[[int], object], is_served: Callable[[], object]) -> None:
    """Memory is flat and others are served while it goes on."""
    process = psutil.Process(pid)
    attack(RESETS // 5)
    is_served()
    before = process.memory_info().rss
    for _ in range(4):
        attack(RESETS // 5)
        is_served()
    grown = process.memory_info().rss - before
    assert grown < MOST_GROWTH_BYTES, f"{grown:,} bytes more after {RESETS:,} streams"


def in_parallel(attack: Callable[[int], object], count: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(attack, [count // 8] * 8))


def test_rapid_resets_leave_a_sidecar_serving(tmp_path: Path) -> None:
    blocks = [
        header_block("/grpc.health.v1.Health/Watch", ""),
        header_block("/paramd.v1.SidecarService/ReadSnapshot", ticket(Role.READER)),
        # Longer than is let in.
        header_block("/paramd.v1.SidecarService/ReadSnapshot", "x" * 15_000),
    ]
    with (
        sidecar(tmp_path / "s") as process,
        attached(process.socket_path, arena_bytes=ARENA_BYTES) as trainer,
        client_of(trainer) as client,
    ):
        client.pin((0, 64))
        one, served = psutil.Process(process.process.pid), lambda: client.pin((0, 64))
        before = one.memory_info().rss
        besieged(one.pid, lambda count: reset_rapidly(trainer.address, blocks, count), served)
        # From many connections at once each of gRPC's threads has its share, which it kept.
        in_parallel(lambda count: reset_rapidly(trainer.address, blocks, count), 2 * RESETS)
        wait_until(lambda: one.memory_info().rss < before + (64 << 20), "it is given back")


def test_rapid_resets_leave_a_control_plane_serving(control: Control) -> None:
    ((_, value),) = control_ticket(Role.SIDECAR, rank=0)
    blocks = [
        header_block("/grpc.health.v1.Health/Watch", ""),
        header_block("/paramd.v1.ControlService/Join", value.removeprefix("Bearer ")),
    ]
    besieged(
        control.process.pid,
        lambda count: reset_rapidly(control.grpc_address, blocks, count),
        lambda: asyncio.run(_joins(control)),
    )
