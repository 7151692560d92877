"""A token is shown to nobody but the control plane: another user of the host, who listens at its
port once it is free, gets none, whatever they answer.

Their programs run with a second uid, which takes root to have.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import torch
from safetensors.torch import save_file

import paramd
from paramd.cli import completion
from paramd.errors import ParamdError, UnreachableError
from paramd.integrations.engines import open_engine
from paramd.layout.types import Box, Layout, Piece, TensorKind, TensorLayout
from paramd.mesh.peers.control import RestClient
from paramd.mesh.peers.grpc import Channels
from paramd.places import read_endpoint
from paramd.security import loopback, near
from paramd.security.loopback import StrangerError
from paramd.state_files import beside_port
from paramd.trainer.helpers.control_link import register
from paramd.trainer.settings import AttachSettings
from paramd_service.control.access.authority import KEY_HEADER
from tests.integration.client_job import running_job
from tests.integration.control_process import JOB, TOKEN, Control, control_plane
from tests.integration.engine_servers import Model, engine_server

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a second uid takes root")

# Prints what it is sent. Answers each request with 200 and the text it was given; with an address,
# passes on what it is asked, and what is answered there.
THIEF = """
import socket, sys, threading
port, body, behind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
server = socket.create_server(("127.0.0.1", port))
print(f"UP {server.getsockname()[1]}", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(20)
        while data := connection.recv(65536):
            print(repr(data), flush=True)
            if behind:
                host, _, at = behind.rpartition(":")
                with socket.create_connection((host, int(at))) as real:
                    real.sendall(data.replace(b"accept:", b"connection: close\\r\\naccept:"))
                    answer = b""
                    while part := real.recv(65536):
                        answer += part
                connection.sendall(answer)
            else:
                head = f"HTTP/1.1 200 OK\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
                connection.sendall((head + body).encode())
"""


class Thief:
    """A program of another user that listens at a loopback port."""

    def __init__(self, port: int = 0, answer: str = "{}", behind: str = "") -> None:
        self._process = subprocess.Popen(
            ["/usr/bin/python3", "-c", THIEF, str(port), answer, behind],
            stdout=subprocess.PIPE,
            text=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
        )
        assert self._process.stdout is not None
        self._heard = ""
        word, _, port_text = self._process.stdout.readline().partition(" ")
        assert word == "UP"
        self.url = f"http://127.0.0.1:{int(port_text)}"

    def heard(self) -> str:
        """All that it was sent; it has ended after that."""
        if self._process.poll() is None:
            self._process.kill()
            self._heard = self._process.communicate()[0]
        return self._heard


@contextlib.contextmanager
def thief(port: int = 0, answer: str = "{}", behind: str = "") -> Iterator[Thief]:
    found = Thief(port, answer, behind)
    try:
        yield found
    finally:
        found.heard()


def asked(url: str, token: str = TOKEN) -> object:
    async def ask() -> object:
        client = RestClient(url, token)
        try:
            return await client.send("GET", "/jobs")
        finally:
            await client.close()

    return asyncio.run(ask())


def at_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients find no Unix socket, as those of another state dir do."""
    monkeypatch.setattr(loopback, "socket_beside", lambda url: "")
    monkeypatch.setattr(near, "socket_beside", lambda url: "")


@pytest.mark.parametrize("answer", ["{}", '{"proof": "' + "0" * 64 + '"}', '{"proof": 1}', "x"])
def test_who_takes_the_port_of_a_dead_control_plane_gets_no_token(answer: str) -> None:
    with control_plane() as control:
        port = urlsplit(control.url).port
        assert port is not None
        assert asked(control.url)
        control.process.send_signal(signal.SIGKILL)
        control.wait()
        with thief(port, answer) as other:
            with pytest.raises(StrangerError, match=f"belongs to uid {NOBODY} now"):
                asked(control.url)
            assert TOKEN not in other.heard()


def test_a_client_that_polls_shows_it_to_nobody_when_its_connection_is_made_again() -> None:
    async def poll() -> None:
        client = RestClient(control.url, TOKEN)
        try:
            await client.send("GET", "/jobs")
            control.process.kill()
            await asyncio.to_thread(control.wait)
            with thief(urlsplit(control.url).port or 0) as other:
                for _ in range(3):
                    with pytest.raises(UnreachableError):
                        await client.send("GET", "/jobs")
                assert TOKEN not in await asyncio.to_thread(other.heard)
        finally:
            await client.close()

    with control_plane() as control:
        asyncio.run(poll())


def test_a_session_that_an_open_page_shows_a_thief_is_worthless_at_another_port() -> None:
    def shown(port: int) -> dict[str, str]:
        """What the page sends with each of its requests, as a thief would to this port."""
        return {"cookie": f"paramd-{port}={cookie}", KEY_HEADER: key}

    with control_plane() as control:
        opened = control.ask("POST", "/session")
        (cookie,), key = opened.cookies.values(), opened.json()["key"]
        port = urlsplit(control.url).port or 0
        assert control.get("/api/v1/session", None, **shown(port)).status_code == 200
        control.process.kill()
        control.wait()
    with thief(port) as other:
        # The page goes on asking where it came from.
        httpx2.get(f"{other.url}/api/v1/session", headers=shown(port), trust_env=False)
        with control_plane() as moved:
            at = urlsplit(moved.url).port or 0
            assert moved.get("/api/v1/session", None, **shown(at)).status_code == 401
        heard = other.heard()
    assert cookie in heard
    assert key in heard


def test_who_takes_the_port_of_an_engine_that_ended_does_not_get_its_key(tmp_path: Path) -> None:
    key = "the-key-of-the-engine"

    async def run() -> None:
        save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
        model = Model(str(tmp_path))
        model.key = key
        with engine_server("vllm", model) as url:
            engine = open_engine("vllm", url, token=key)
            assert await engine.serving()
        try:
            with thief(urlsplit(url).port or 0) as other:
                with pytest.raises(StrangerError, match=f"belongs to uid {NOBODY} now"):
                    await engine.serving()
                assert key not in await asyncio.to_thread(other.heard)
        finally:
            await engine.close()

    asyncio.run(run())


def test_an_engine_of_another_user_keeps_getting_its_key() -> None:
    async def run(url: str) -> None:
        engine = open_engine("vllm", url, token="key")
        try:
            for _ in range(2):
                assert await engine.serving()
        finally:
            await engine.close()

    with thief() as other:
        asyncio.run(run(other.url))


def test_a_program_in_between_gets_the_proof_of_another_address() -> None:
    with control_plane() as control, thief(behind=urlsplit(control.url).netloc) as between:
        with pytest.raises(StrangerError):
            asked(between.url)
        heard = between.heard()
    assert loopback.PROOF_PATH in heard
    assert TOKEN not in heard


def test_a_control_plane_of_another_user_proves_that_it_knows_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_port(monkeypatch)
    # As seen by another user than the one whose it is: theirs is a proof, not a uid.
    monkeypatch.setattr(loopback, "owners", lambda local, peer: {NOBODY})
    with control_plane() as control:
        assert asked(control.url)
        viewer = control.new_token("viewer")
        assert asked(control.url, viewer)
        with pytest.raises(StrangerError):
            asked(control.url, "pmd_" + "x" * 43)
        control.ask("DELETE", f"/tokens/{token_name(control)}")
        with pytest.raises(StrangerError):
            asked(control.url, viewer)


def test_clients_of_the_same_user_call_a_unix_socket_that_nobody_else_may() -> None:
    """As seen from the kernel: the port takes no connection, and a second uid gets at no socket."""

    with control_plane() as control:
        port = urlsplit(control.url).port
        assert port is not None
        path = beside_port("127.0.0.1", port)
        assert read_endpoint(JOB).socket == str(path)
        assert asyncio.run(connected_at(control.url)) == 0
        assert asyncio.run(connected_at(control.url.replace("127.0.0.1", "localhost"))) == 0
        # Not for others; and what is passed on to one who may enter is not taken from them either.
        code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        command = ["/usr/bin/python3", "-c", code, str(path)]
        other = subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert "PermissionError" in other.stderr
        assert asked_from(NOBODY, path) == b""
        assert asked_from(0, path).startswith(b"HTTP/1.1 200")
        # For browsers and curl the port stays.
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(HEALTH)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


async def connected_at(url: str) -> int:
    """Ask there, and count the connections at the port meanwhile."""
    client = RestClient(url, TOKEN)
    try:
        assert await client.jobs()
        at = (loopback.plain_ip("127.0.0.1"), urlsplit(url).port)
        return sum(here == at and state == "01" for here, _, state, _ in loopback._sockets())
    finally:
        await client.close()


def asked_from(uid: int, path: Path) -> bytes:
    """What a process of this uid is answered over a socket in a folder that it may not enter, once
    somebody who may has opened the folder for it."""
    code = (
        "import os, socket, sys; folder, name, uid = sys.argv[1:]; os.chdir(folder);"
        "os.setgroups([]); os.setgid(int(uid));"
        "os.setuid(int(uid)); s = socket.socket(socket.AF_UNIX); s.connect(name);"
        f"s.sendall({HEALTH!r}); sys.stdout.buffer.write(s.recv(65536))"
    )
    command = ["/usr/bin/python3", "-c", code, str(path.parent), path.name, str(uid)]
    try:
        for folder in (path.parent, path):
            folder.chmod(0o777)
        return subprocess.run(command, capture_output=True, check=False, timeout=60).stdout
    finally:
        path.parent.chmod(0o700)


def test_without_the_socket_clients_use_the_port_and_a_left_one_misleads_nobody() -> None:
    with control_plane() as control:
        port = urlsplit(control.url).port
        assert port is not None
        path = beside_port("127.0.0.1", port)
        control.process.kill()
        control.wait()
        assert path.is_socket()
        with pytest.raises(UnreachableError):
            asked(control.url)
        # A server that has no socket of its own, beside the one that is left.
        with control_plane(job="other", incarnation=2, listen=f"127.0.0.1:{port}") as other:
            taken = path.with_name("moved")
            path.rename(taken)
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(path))
            assert asyncio.run(connected_at(other.url)) == 1


def token_name(control: Control) -> str:
    (found,) = [
        row["name"]
        for row in control.ask("GET", "/tokens").json()["tokens"]
        if row["role"] == "viewer"
    ]
    return str(found)


def test_a_training_registers_nowhere_else() -> None:
    with thief() as other:
        settings = AttachSettings(control=other.url, token=TOKEN)
        with pytest.raises(StrangerError):
            register(settings, job="run", world_size=1, incarnation_floor=0)
        assert TOKEN not in other.heard()


def test_a_tunnel_and_a_completion_show_it_to_nobody_else() -> None:
    async def tunnel(url: str) -> None:
        client = RestClient(url, TOKEN)
        try:
            await client.tunnel(f"/jobs/{JOB}/ranks/0/tunnel")
        finally:
            await client.close()

    with control_plane() as control:
        # Both take its Unix socket, which needs no proof.
        with pytest.raises(ParamdError, match="rank 0"):
            asyncio.run(tunnel(control.url))
        assert completion._get(control.url, TOKEN, None, "/jobs")["jobs"]
    with thief() as other:
        with pytest.raises(StrangerError):
            asyncio.run(tunnel(other.url))
        with pytest.raises(ParamdError):
            completion._get(other.url, TOKEN, None, "/jobs")
        assert TOKEN not in other.heard()


def test_a_connection_that_waits_to_be_accepted_has_its_listeners_owner() -> None:
    # The kernel shows root for it, which must not pass for root's.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        os.fchown(listener.fileno(), NOBODY, NOBODY)
        listener.listen()
        with socket.create_connection(listener.getsockname()) as connection:
            peer, local = listener.getsockname(), connection.getsockname()
            by, to = (loopback.plain_ip(local[0]), local[1]), (loopback.plain_ip(peer[0]), peer[1])
            assert NOBODY in loopback.owners(by, to)


def test_whoever_accepts_and_stops_listening_while_we_look_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, accepted = loopback._sockets, list[socket.socket]()
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        os.fchown(listener.fileno(), NOBODY, NOBODY)
        listener.listen()
        peer = listener.getsockname()
        connection = stack.enter_context(socket.create_connection(peer))
        local = connection.getsockname()
        by, to = (loopback.plain_ip(local[0]), local[1]), (loopback.plain_ip(peer[0]), peer[1])

        def look() -> Iterator[tuple[loopback.Address, loopback.Address, str, int]]:
            for here, there, state, uid in list(looks()):
                # Until it is accepted it is root's, as older kernels than this one may show.
                waits = (here, there) == (to, by) and not accepted
                yield here, there, state, 0 if waits else uid
            if not accepted:
                accepted.append(stack.enter_context(listener.accept()[0]))
                os.fchown(accepted[0].fileno(), NOBODY, NOBODY)
                listener.close()

        monkeypatch.setattr(loopback, "_sockets", look)
        assert NOBODY in loopback.owners(by, to)
        assert accepted


@pytest.mark.parametrize("family", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_our_own_listeners_are_known_at_each_address(family: str) -> None:
    kind = socket.AF_INET6 if ":" in family else socket.AF_INET
    with socket.socket(kind) as listener:
        listener.bind((family, 0))
        listener.listen()
        with socket.socket(kind) as connection:
            connection.connect(listener.getsockname())
            assert loopback.question("http://localhost:1", TOKEN, connection) is None


HALF = 16
LAYOUT = Layout(
    world_size=2,
    arena_bytes=(4096, 4096),
    tensors=(
        TensorLayout(
            "w",
            "float32",
            (2 * HALF,),
            TensorKind.PARAMETER,
            tuple(Piece(r, 0, Box((r * HALF,), ((r + 1) * HALF,))) for r in range(2)),
        ),
    ),
)


@pytest.mark.parametrize("who", ["sidecar", "control plane"])
def test_a_ticket_goes_to_our_own_socket_and_never_to_who_takes_a_servers_port(who: str) -> None:
    with running_job(LAYOUT) as job, paramd.connect(job.url, job.token) as mesh:
        mesh.summon("*", transport="grpc")
        rank, process = job.ranks[0], job.ranks[0].process if who == "sidecar" else job.control
        address = rank.address if who == "sidecar" else job.control_address
        port = int(address.rpartition(":")[2])
        assert loopback.way_to("127.0.0.1", port) == f"unix:{beside_port('127.0.0.1', port)}"
        process.kill()
        process.wait()
        with thief(port) as other:
            with pytest.raises(StrangerError, match=f"belongs to uid {NOBODY} now"):
                loopback.way_to("127.0.0.1", port)
            # A client that has asked there before, and a new one. Without a control plane it reads.
            with pytest.raises(ParamdError) if who == "sidecar" else contextlib.nullcontext():
                mesh.summon("*", transport="grpc", timeout=5)
            with pytest.raises(ParamdError):
                Channels(lambda rank: "ticket").channel(address)
            # Sidecars ask for their control plane: a connection begins, and shows nothing before
            # whoever is there has answered as one.
            heard = other.heard().splitlines()
            assert all(one.startswith("b'PRI * HTTP/2.0") and len(one) < 500 for one in heard)
