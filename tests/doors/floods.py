"""Each listener under each flood, beside a plain server of its kind in the same run.

The servers and their owner are this user, the floods of two others (65534 and 65533), each at half
of the strength; those of Unix sockets are of this user too, as nobody else may enter their folder.
A row says how many of the owner's requests were answered in a second, each over a connection of its
own, and how many of the plain server's, which has no doors of its own:

    REST        uvicorn, as paramd's dependencies install it (h11, asyncio), with a route of FastAPI
                that checks a token
    gRPC        gRPC's own server, with its health service
    MCP         uvicorn, as for REST, beside `paramd mcp --http`
    tunnel      uvicorn, as for REST, whose route asks gRPC's server whether it begins, beside a
                tunnel to the control plane's gRPC through which the client asks that itself

All have 256 descriptors.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DESCRIPTORS = 256
FLOODS = ("none", "dropped at once", "opened and closed", "silent", "half a request", "slow")
WITH_TOKEN = "with a token"
"""Whole requests with another's token, over connections that are kept."""
TUNNELS = "tunnels with a token"
"""The same, of tunnels that stay open."""
USERS = (65534, 65533)
HALF = 200
"""Connections that each of the two users holds."""
PATIENCE_S = 60.0
PLAIN_PATIENCE_S = 5.0
"""For the plain server's first answer: that it has none is a result."""
JOB = "doors"
TURNS = 3
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

FLOOD = r"""
import socket, sys, time
kind, there, count, token = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
family = socket.AF_UNIX if there.startswith("/") else socket.AF_INET
if family == socket.AF_INET:
    there = ("127.0.0.1", int(there))
path = b"/api/v1/jobs/doors/tunnel" if kind.startswith("tunnels") else b"/api/v1/jobs"
begin = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n" % path
begin += b"Connection: upgrade\r\nUpgrade: paramd-tunnel\r\n" if kind.startswith("tunnels") else b""
begin += b"Authorization: Bearer %s\r\n\r\n" % token.encode() if token else b"X-Slow: "
print("UP", flush=True)
def opened():
    one = socket.socket(family)
    one.settimeout(2)
    one.connect(there)
    return one
while kind == "dropped at once":
    one = socket.socket(family)
    one.setblocking(False)
    try:
        one.connect(there)
    except OSError:
        pass
    one.close()
while kind == "opened and closed":
    try:
        opened().close()
    except OSError:
        time.sleep(0.001)
held = []
while True:
    try:
        while len(held) < count:
            one = opened()
            if kind != "silent":
                one.sendall(begin)
            one.setblocking(False)
            held.append(one)
    except OSError:
        pass
    time.sleep(0.3)
    kept = []
    for one in held:
        try:
            if kind == "slow":
                one.send(b"x")
            if one.recv(1 << 16) == b"":
                raise OSError
            kept.append(one)
        except BlockingIOError:
            kept.append(one)
        except OSError:
            one.close()
    held = kept
"""

PLAIN_HTTP = """
import asyncio, hmac, os, sys, uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
app = FastAPI()
tokens = ["Bearer " + one for one in os.environ["PLAIN_TOKENS"].split()]
async def known(request: Request) -> None:
    given = request.headers.get("authorization", "")
    if not any([hmac.compare_digest(given, one) for one in tokens]):
        raise HTTPException(401)
@app.get("/api/v1/jobs", dependencies=[Depends(known)])
async def jobs() -> dict[str, list[str]]:
    return {"jobs": []}
@app.get("/begun", dependencies=[Depends(known)])
async def begun() -> dict[str, bool]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["PLAIN_GRPC_PORT"]))
    try:
        writer.write(bytes.fromhex(os.environ["PLAIN_PREFACE"]))
        return {"begun": (await reader.readexactly(9))[3] == 4}
    finally:
        writer.close()
@app.get("/mcp", dependencies=[Depends(known)])
async def mcp() -> dict[str, list[str]]:
    return {"jobs": []}
there = {"uds": sys.argv[1]} if sys.argv[1].startswith("/") else {"port": int(sys.argv[1])}
uvicorn.run(app, log_level="critical", http="h11", loop="asyncio", **there)
"""

PLAIN_GRPC = """
import asyncio, sys, grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
async def run():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    there = sys.argv[1]
    server.add_insecure_port(f"unix:{there}" if there.startswith("/") else f"127.0.0.1:{there}")
    await server.start()
    await server.wait_for_termination()
asyncio.run(run())
"""


@dataclass(frozen=True)
class Server:
    """A server at a port or path, and one request to it, which tells whether it was answered."""

    process: subprocess.Popen[bytes]
    there: str
    ask: Callable[[], bool]


def free_ports() -> tuple[int, int]:
    """Two ports that nobody listens at now."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def connected(there: str) -> socket.socket:
    """A connection to a port or a path."""
    found = socket.socket(socket.AF_UNIX if there.startswith("/") else socket.AF_INET)
    try:
        found.settimeout(5)
        found.connect(there if there.startswith("/") else ("127.0.0.1", int(there)))
    except OSError:
        found.close()
        raise
    return found


def asked_http(there: str, token: str, path: str = "/api/v1/jobs") -> bool:
    """Whether a request that shows the token is answered, whatever with."""
    connection = http.client.HTTPConnection("127.0.0.1", timeout=5)
    try:
        connection.sock = connected(there)
        connection.request("GET", path, headers={"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        answer.read()
        return answer.status < 500 and answer.status not in (401, 403, 404, 429)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def asked_grpc(there: str) -> bool:
    options = [("grpc.use_local_subchannel_pool", 1)]
    target = f"unix:{there}" if there.startswith("/") else f"127.0.0.1:{there}"
    with grpc.insecure_channel(target, options) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True
            )
            return True
        except grpc.RpcError:
            return False


def asked_through(there: str, head: bytes) -> bool:
    """Whether gRPC's server at the other end of a tunnel begins. `head` asks for the tunnel."""
    try:
        with connected(there) as connection:
            connection.sendall(head)
            taken = b""
            while b"\r\n\r\n" not in taken:
                if not (part := connection.recv(4096)):
                    return False
                taken += part
            answer, _, begun = taken.partition(b"\r\n\r\n")
            if b" 101 " not in answer:
                return False
            connection.sendall(PREFACE)
            # Its settings: a frame of type 4. It may have begun with the answer.
            while len(begun) < 4:
                if not (part := connection.recv(9)):
                    return False
                begun += part
            return begun[3:4] == b"\x04"
    except OSError:
        return False


@contextlib.contextmanager
def ended(command: Sequence[str], **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program with few descriptors, which ends with the block."""
    limited = ["bash", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "bash", *command]
    process = subprocess.Popen(
        limited, env=os.environ | more, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until_asked(server: Server) -> Server:
    deadline_s = time.monotonic() + PATIENCE_S
    while not server.ask():
        if server.process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"the server at {server.there} did not begin")
        time.sleep(0.1)
    return server


@dataclass(frozen=True, kw_only=True)
class Site:
    """A control plane with a registered job that has no ranks."""

    process: subprocess.Popen[bytes]
    folder: Path
    rest: str
    grpc: str
    token: str
    others: str
    """A reader's token."""

    def beside(self, port: str) -> str:
        """Path of the Unix socket beside a port."""
        (found,) = Path(self.folder, "_sockets").glob(f"*-{port}")
        return str(found)


@contextlib.contextmanager
def site() -> Iterator[Site]:
    rest, grpc_port = free_ports()
    # Not below a folder of pytest's: a socket's path is short.
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder:
        command = [sys.executable, "-m", "paramd_service.control"]
        command += ["--listen", f"127.0.0.1:{rest}", "--grpc-listen", f"127.0.0.1:{grpc_port}"]
        with ended(command, PARAMD_STATE_DIR=folder) as process:
            path = Path(folder, "_site", "token")
            deadline_s = time.monotonic() + PATIENCE_S
            while not path.exists() and time.monotonic() < deadline_s:
                time.sleep(0.1)
            token = path.read_text().strip()
            until_asked(Server(process, str(rest), lambda: asked_http(str(rest), token)))
            begun = {"job": JOB, "world_size": 1, "incarnation_floor": 0}
            posted(rest, token, "/api/v1/jobs", begun)
            made = posted(rest, token, "/api/v1/tokens", {"role": "reader"})
            yield Site(
                process=process,
                folder=Path(folder),
                rest=str(rest),
                grpc=str(grpc_port),
                token=token,
                others=str(made["token"]),
            )


def posted(port: int, token: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The document that a request of the owner's is answered with."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        if answer.status != 201:
            raise SystemExit(f"{path}: {found}")
        return dict(found)


Pair = tuple[Server, Server]


@contextlib.contextmanager
def rest_pair(ours: Site, *, is_unix: bool) -> Iterator[Pair]:
    there = str(ours.folder / "plain") if is_unix else str(free_ports()[0])
    command = [sys.executable, "-c", PLAIN_HTTP, there]
    with ended(command, PLAIN_TOKENS=f"{ours.token} {ours.others}") as plain:
        mine = ours.beside(ours.rest) if is_unix else ours.rest
        yield (
            Server(ours.process, mine, lambda: asked_http(mine, ours.token)),
            Server(plain, there, lambda: asked_http(there, ours.token)),
        )


@contextlib.contextmanager
def grpc_pair(ours: Site, *, is_unix: bool) -> Iterator[Pair]:
    there = str(ours.folder / "plain") if is_unix else str(free_ports()[0])
    with ended([sys.executable, "-c", PLAIN_GRPC, there]) as plain:
        mine = ours.beside(ours.grpc) if is_unix else ours.grpc
        yield (
            Server(ours.process, mine, lambda: asked_grpc(mine)),
            Server(plain, there, lambda: asked_grpc(there)),
        )


@contextlib.contextmanager
def mcp_pair(ours: Site) -> Iterator[Pair]:
    port, plain_port = map(str, free_ports())
    command = [sys.executable, "-m", "paramd.cli", "mcp", "--http", port]
    command += ["--url", f"http://127.0.0.1:{ours.rest}", "--job", JOB]
    with (
        ended(command, PARAMD_STATE_DIR=str(ours.folder), PARAMD_TOKEN=ours.others) as process,
        ended([sys.executable, "-c", PLAIN_HTTP, plain_port], PLAIN_TOKENS=ours.others) as plain,
    ):
        yield (
            Server(process, port, lambda: asked_http(port, ours.others, "/mcp")),
            Server(plain, plain_port, lambda: asked_http(plain_port, ours.others, "/mcp")),
        )


@contextlib.contextmanager
def tunnel_pair(ours: Site) -> Iterator[Pair]:
    behind, port = map(str, free_ports())
    head = (
        f"GET /api/v1/jobs/{JOB}/tunnel HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"authorization: Bearer {ours.token}\r\nconnection: upgrade\r\n"
        "upgrade: paramd-tunnel\r\n\r\n"
    ).encode()
    with (
        ended([sys.executable, "-c", PLAIN_GRPC, behind]),
        ended(
            [sys.executable, "-c", PLAIN_HTTP, port],
            PLAIN_TOKENS=f"{ours.token} {ours.others}",
            PLAIN_GRPC_PORT=behind,
            PLAIN_PREFACE=PREFACE.hex(),
        ) as plain,
    ):
        yield (
            Server(ours.process, ours.rest, lambda: asked_through(ours.rest, head)),
            Server(plain, port, lambda: asked_http(port, ours.token, "/begun")),
        )


LISTENERS: dict[str, Callable[[Site], contextlib.AbstractContextManager[Pair]]] = {
    "REST": lambda ours: rest_pair(ours, is_unix=False),
    "REST, Unix": lambda ours: rest_pair(ours, is_unix=True),
    "gRPC": lambda ours: grpc_pair(ours, is_unix=False),
    "gRPC, Unix": lambda ours: grpc_pair(ours, is_unix=True),
    "MCP": mcp_pair,
    "tunnel": tunnel_pair,
}
WITH_TOKENS = {"REST": WITH_TOKEN, "REST, Unix": WITH_TOKEN, "tunnel": TUNNELS}
"""The flood with another's token, of listeners that take tokens."""


@contextlib.contextmanager
def flooded(kind: str, there: str, token: str) -> Iterator[None]:
    """The flood, of two other users where this one is root and there is a port."""
    running: list[subprocess.Popen[str]] = []
    try:
        for uid in USERS if kind != "none" else ():
            others = os.geteuid() == 0 and not there.startswith("/")
            who = {"user": uid, "group": uid, "extra_groups": []} if others else {}
            given = token if kind in WITH_TOKENS.values() else ""
            process = subprocess.Popen(
                ["/usr/bin/python3", "-c", FLOOD, kind, there, str(HALF), given],
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",
                **who,  # type: ignore[call-overload]
            )
            running.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "UP\n"
        yield
    finally:
        for process in running:
            process.kill()
            process.communicate()


def answered(server: Server, seconds: float, patience_s: float) -> float:
    """Requests that were answered in a second; 0 if none was within `patience_s`."""
    good = 0
    begun_s = time.monotonic()
    # On a loaded machine one answer may take longer: it has to come, not to come soon.
    while (passed_s := time.monotonic() - begun_s) < seconds or (
        not good and passed_s < patience_s
    ):
        good += server.ask()
    return good / (time.monotonic() - begun_s)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One listener under one flood."""

    listener: str
    flood: str
    ours_per_s: float
    plain_per_s: float
    lives: bool
    """Whether both servers still ran."""

    @property
    def ratio(self) -> float:
        """Our rate over the plain server's."""
        return self.ours_per_s / self.plain_per_s if self.plain_per_s else math.inf

    def problem(self, *, strict: bool) -> str:
        """What is wrong; empty if the doors held. The ratio needs a calm machine (`strict`), and is
        of floods: the row without one only says what paramd does more than a plain server."""
        if not self.lives:
            return "the server ended"
        if not self.ours_per_s:
            return "the owner had no answer"
        if strict and self.flood != "none" and self.ratio < 0.5:
            return "the owner had less than half of the plain server's rate"
        return ""


def rows(listener: str, kinds: Sequence[str], seconds: float, ours: Site) -> Iterator[Row]:
    """Measure one listener, both servers in turns: the machine is not calm for long."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), hard))
    with LISTENERS[listener](ours) as servers:
        for server in servers:
            until_asked(server)
        for kind in (*kinds, *([WITH_TOKENS[listener]] if listener in WITH_TOKENS else [])):
            found: dict[str, list[float]] = {server.there: [] for server in servers}
            turns = TURNS if seconds > 1 else 1
            for server in servers * turns:
                with flooded(kind, server.there, ours.others):
                    patience_s = PATIENCE_S if server is servers[0] else PLAIN_PATIENCE_S
                    found[server.there].append(answered(server, seconds / turns, patience_s))
            mine, theirs = (sum(found[one.there]) / len(found[one.there]) for one in servers)
            yield Row(
                listener=listener,
                flood=kind,
                ours_per_s=mine,
                plain_per_s=theirs,
                lives=all(one.process.poll() is None for one in servers),
            )
