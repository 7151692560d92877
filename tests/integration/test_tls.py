"""TLS end to end: who is refused, and how certificates change under open streams."""

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import psutil
import pytest
import torch

import paramd
from paramd.errors import UnreachableError
from paramd.mesh.peers.bulk import BulkStream, NoStreamError
from paramd.mesh.peers.sidecars import StreamOffer
from paramd.security import authority
from paramd.security.tickets import Role
from paramd.security.tls import SCHEME, ClientTls, open_channel
from paramd.streams import Grant, Opening
from paramd.v1 import common_pb2, control_pb2_grpc, sidecar_pb2, sidecar_pb2_grpc
from tests.integration.client_job import JOB, Job, halves, running_job
from tests.integration.control_process import TOKEN, Control, FakeSidecar, control_plane, ticket
from tests.integration.fake_trainer import TrainerSettings, attach
from tests.integration.sidecar_process import Client, sidecar, wait_until

pytestmark = pytest.mark.usefixtures("grpc_is_up")

NAMES = ["localhost", "127.0.0.1", "control.example"]


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Certificates that all processes of a test find in their environment."""
    directory = tmp_path / "certs"
    authority.write(directory, names=NAMES, days=30)
    for name, file in (("CERT", "server.pem"), ("KEY", "server.key"), ("CA", "ca.pem")):
        monkeypatch.setenv(f"PARAMD_TLS_{name}", str(directory / file))
    return directory


def tls(certs: Path, *, with_certificate: bool = False) -> ClientTls:
    if not with_certificate:
        return ClientTls(ca=certs / "ca.pem")
    return ClientTls(ca=certs / "ca.pem", cert=certs / "client.pem", key=certs / "client.key")


def health(control: Control, verify: ssl.SSLContext) -> int:
    return httpx2.get(f"{control.url}/healthz", verify=verify, trust_env=False).status_code


def expiry_metric(control: Control, verify: ssl.SSLContext) -> float:
    """When the certificate in force ends, as Prometheus is told."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx2.get(f"{control.url}/metrics", headers=headers, verify=verify, trust_env=False)
    (line,) = [t for t in answer.text.splitlines() if t.startswith("paramd_tls_expiry_timestamp")]
    return float(line.split()[1])


async def call_code(address: str, using: ClientTls) -> grpc.StatusCode:
    """Status of a call of Join without a ticket: UNAUTHENTICATED once a handshake succeeded."""
    async with open_channel(address, using) as channel:
        call = channel.stream_stream("/paramd.v1.ControlService/Join")(timeout=10.0)
        return await call.code()


def peer_certificate(address: str, ca: Path) -> bytes:
    """What a server shows in a new handshake. No SNI: the name is an address."""
    host, _, port = address.removeprefix("https://").removeprefix(SCHEME).rpartition(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(ca)).encode()


async def test_rest_and_grpc_are_tls_and_strangers_of_another_ca_are_refused(
    certs: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    authority.write(other, names=NAMES, days=30)
    with control_plane() as control:
        assert control.url.startswith("https://127.0.0.1:")
        assert control.grpc_address.startswith("grpcs://127.0.0.1:")
        assert health(control, tls(certs).ssl_context()) == 200
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            health(control, tls(other).ssl_context())
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(control.url.replace("https", "http") + "/healthz", trust_env=False)
        unauthenticated = grpc.StatusCode.UNAUTHENTICATED
        assert await call_code(control.grpc_address, tls(certs)) is unauthenticated
        assert await call_code(control.grpc_address, tls(other)) is grpc.StatusCode.UNAVAILABLE
        plain = control.grpc_address.removeprefix(SCHEME)
        assert await call_code(plain, tls(certs)) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_is_replaced_while_streams_go_on(certs: Path) -> None:
    with control_plane() as control:
        verify = tls(certs).ssl_context()
        expiry_s = expiry_metric(control, verify)
        assert expiry_s == pytest.approx(time.time() + 30 * 86_400, abs=3600)
        sidecar = FakeSidecar(0, address="127.0.0.1:1")
        async with (
            httpx2.AsyncClient(verify=verify, trust_env=False) as client,
            open_channel(control.grpc_address, tls(certs)) as channel,
        ):
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            stream = stub.Join(metadata=ticket(Role.SIDECAR))
            await stream.write(sidecar.report())
            assert await stream.read() is not grpc.aio.EOF
            assert (await client.get(f"{control.url}/healthz")).status_code == 200
            before = (certs / "server.pem").read_bytes()
            authority.write(certs, names=NAMES, days=60)
            after = (certs / "server.pem").read_bytes()
            assert before.split() != after.split()
            for address in (control.url, control.grpc_address):
                shown = peer_certificate(address, certs / "ca.pem")
                assert shown.split() == after.split(), address
            # The old stream and the old connection have not noticed.
            await stream.write(sidecar.report())
            assert not stream.done()
            assert (await client.get(f"{control.url}/healthz")).status_code == 200
            stream.cancel()
        assert expiry_metric(control, verify) > expiry_s + 29 * 86_400


async def test_clients_without_a_certificate_are_refused_when_one_is_asked_for(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_TLS_CLIENT_CA", str(certs / "ca.pem"))
    with control_plane() as control:
        with pytest.raises(httpx2.HTTPError):
            health(control, tls(certs).ssl_context())
        mine = tls(certs, with_certificate=True)
        assert health(control, mine.ssl_context()) == 200
        assert await call_code(control.grpc_address, tls(certs)) is grpc.StatusCode.UNAVAILABLE
        assert await call_code(control.grpc_address, mine) is grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
def job(certs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    # Its sidecars' memory is measured.
    monkeypatch.setenv("PARAMD_TESTS_COLD", "1")
    with running_job(halves(8)) as found:
        for rank in found.ranks:
            floats = rank.arena.buffer.cast("f")
            for at in range(8):
                floats[at] = 8 * rank.rank + at
            floats.release()
        yield found


def own_memory_bytes(pid: int) -> int:
    """Resident memory of a process that it shares with no other. Libraries are shared by all
    sidecars of a host, and how much of them is mapped differs from machine to machine."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return kib["RssAnon"] << 10


def summoned(job: Job, ca: Path | None, transport: Any = "grpc") -> list[float]:
    with paramd.connect(job.url, job.token, tls_ca=ca) as mesh:
        values: list[float] = mesh.summon("*", transport=transport)["weight"].flatten().tolist()
        return values


def test_a_whole_job_works_over_tls_and_its_clients_trust_the_ca(
    job: Job, certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job.url.startswith("https://")
    assert all(rank.address.startswith("grpcs://") for rank in job.ranks)
    with paramd.connect(job.url, job.token) as mesh:
        wait_until(lambda: _summons(mesh), "the sidecars have joined over TLS", 20.0)
    assert summoned(job, None) == [float(n) for n in range(16)]
    for rank in job.ranks:
        # 33 MiB were measured. A library more, as the HTTP client of PyJWT, takes several.
        assert own_memory_bytes(rank.process.pid) <= 40 << 20
    answer = httpx2.get(
        f"{job.url}/api/v1/jobs/{JOB}/ranks/1/metrics",
        headers={"authorization": f"Bearer {job.token}"},
        verify=ssl.create_default_context(cafile=str(certs / "ca.pem")),
        trust_env=False,
    )
    assert f'paramd_sidecar_tls_files_ok{{job="{JOB}",rank="1"}} 1' in answer.text
    (expiry,) = re.findall(
        r"^paramd_sidecar_tls_expiry_timestamp_seconds{.*} (.*)$", answer.text, re.M
    )
    assert time.time() < float(expiry)
    monkeypatch.delenv("PARAMD_TLS_CA")
    assert summoned(job, certs / "ca.pem") == [float(n) for n in range(16)]
    authority.write(tmp_path / "other", names=NAMES, days=30)
    with pytest.raises(UnreachableError, match=r"cannot be trusted: .* is not its CA"):
        summoned(job, tmp_path / "other" / "ca.pem")


NUMEL = 3 << 20


@pytest.mark.parametrize(
    ("days", "trusted", "told"),
    [
        (-1e-3, "ca.pem", "has expired; renew its certificate, or correct this machine's clock"),
        (3, "other.pem", "other.pem is not its CA; give the right one with --tls-ca"),
    ],
)
def test_a_certificate_that_is_not_trusted_is_told_with_its_cure(
    days: float, trusted: str, told: str, tmp_path: Path
) -> None:
    authority.write(tmp_path, names=NAMES, days=days)
    authority.write(tmp_path / "other", names=NAMES, days=3)
    (tmp_path / "other" / "ca.pem").rename(tmp_path / "other.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                context.wrap_socket(connection, server_side=True)

        served = threads.submit(serve)
        ca = str(tmp_path / trusted)
        with pytest.raises(UnreachableError, match=re.escape(told)) as error:
            paramd.connect(url, token="t" * 32, job=JOB, tls_ca=ca)
        assert url in str(error.value)
        served.result(10.0)


@pytest.mark.parametrize("with_checksums", [False, True])
def test_many_windows_cross_tls_whole(
    certs: Path, monkeypatch: pytest.MonkeyPatch, with_checksums: bool
) -> None:
    monkeypatch.setattr(StreamOffer, "leaves_host", property(lambda _: with_checksums))
    expected = torch.arange(2 * NUMEL, dtype=torch.float32)
    with running_job(halves(NUMEL)) as job:
        for rank in job.ranks:
            arena = torch.frombuffer(rank.arena.buffer, dtype=torch.float32)
            arena[:NUMEL] = expected[rank.rank * NUMEL : (rank.rank + 1) * NUMEL]
            del arena
        with paramd.connect(job.url, job.token) as mesh:
            wait_until(lambda: _summons(mesh), "the sidecars have joined over TLS", 20.0)
            whole = mesh.summon("*", transport="stream")["weight"]
            assert torch.equal(whole, expected)
            part = mesh.summon(f"weight[{NUMEL - 5}:{NUMEL + 7}]", transport="stream")
            assert torch.equal(part["weight"], expected[NUMEL - 5 : NUMEL + 7])


def test_bulk_streams_are_tls_and_strangers_of_another_ca_are_refused(
    job: Job, certs: Path, tmp_path: Path
) -> None:
    with paramd.connect(job.url, job.token) as mesh:
        wait_until(lambda: _summons(mesh), "the sidecars have joined over TLS", 20.0)
    assert summoned(job, None, "stream") == [float(n) for n in range(16)]
    authority.write(tmp_path / "other", names=NAMES, days=30)
    other = tls(tmp_path / "other").ssl_context(ssl.TLSVersion.TLSv1_3)
    mine = tls(certs).ssl_context()
    older = tls(certs).ssl_context()
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    port = stream_port(job)
    with tls_connection(port, mine) as connection:
        assert connection.version() == "TLSv1.3"
    for context in (other, older):
        with pytest.raises(ssl.SSLError):
            tls_connection(port, context)
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as plain:
        plain.sendall(Opening(bytes(16), 0, 1).sealed(bytes(32)))
        with contextlib.suppress(ConnectionError):
            assert b"PBS1" not in plain.recv(1 << 10), "nothing is said without TLS"
    # The certificate is a name's: what a reader of another CA gets is no answer.
    offer = StreamOffer(Grant(bytes(16), bytes(32)), common_pb2.Header(), "127.0.0.1", port, other)
    with pytest.raises(NoStreamError, match="CERTIFICATE_VERIFY_FAILED"):
        BulkStream(offer, 0, 1).open()


def test_a_stalled_reader_over_tls_is_hung_up_on_when_its_lease_ends(
    certs: Path, tmp_path: Path
) -> None:
    size = 24 << 20
    credentials = tls(certs).channel_credentials()
    with sidecar(tmp_path / "s", "--idle-memory-s", "0.2") as process:
        trainer = attach(process.socket_path, TrainerSettings(arena_bytes=size))
        address = trainer.address.removeprefix(SCHEME)
        with (
            contextlib.closing(trainer),
            contextlib.closing(Client(address, arena_bytes=size)) as client,
            grpc.secure_channel(address, credentials) as channel,
        ):
            client.stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
            trainer.send_mesh()
            trainer.update()
            pinned = client.pin(lease_ms=500).snapshot_id
            grant = client.call("GrantStream", sidecar_pb2.GrantStreamRequest(snapshot_id=pinned))
            stalled = tls_connection(grant.port, tls(certs).ssl_context())
            with stalled:
                stalled.sendall(Opening(grant.grant_id, 0, size).sealed(grant.secret))
                assert stalled.recv(4) == b"PBS1"

                def is_free() -> bool:
                    return client.state().state.snapshot_bytes == 0

                assert not is_free()
                wait_until(is_free, "the memory is given back", 4.0)
                with contextlib.suppress(OSError):
                    while stalled.recv(1 << 20):
                        pass


def tls_connection(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    try:
        return context.wrap_socket(plain, server_hostname="127.0.0.1")
    except BaseException:
        plain.close()
        raise


def stream_port(job: Job) -> int:
    """Where rank 0's sidecar listens beside gRPC."""
    taken = int(job.ranks[0].address.rpartition(":")[2])
    found = psutil.Process(job.ranks[0].process.pid).net_connections("tcp")
    (port,) = {int(one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN} - {taken}
    return port


def _summons(mesh: Any) -> bool:
    try:
        return len(mesh.summon("*", transport="grpc")) == 1
    except UnreachableError:
        return False
