"""Each listener under each flood, beside a plain server of its kind in the same run.

The servers and their owner are this user, the floods of two others (65534 and 65533), each at half
of the strength. A row says how many of the owner's requests were answered in a second, each over a
connection of its own, and how many of the plain server's, which has no doors of its own: uvicorn
with a route of FastAPI that checks a token, or gRPC's server. All have 256 descriptors.
"""

from __future__ import annotations

import contextlib
import http.client
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

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DESCRIPTORS = 256
FLOODS = ("none", "dropped at once", "opened and closed", "silent", "half a request", "slow")
USERS = (65534, 65533)
HALF = 200
"""Connections that each of the two users holds."""
PATIENCE_S = 60.0

FLOOD = r"""
import socket, sys, time
kind, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
there = ("127.0.0.1", port)
begin = b"GET /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
print("UP", flush=True)
def opened():
    return socket.create_connection(there, timeout=2)
while kind == "dropped at once":
    one = socket.socket()
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
        except BlockingIOError:
            kept.append(one)
        except OSError:
            one.close()
    held = kept
"""

PLAIN_HTTP = """
import hmac, os, sys, uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
app = FastAPI()
async def known(request: Request) -> None:
    wanted = "Bearer " + os.environ["PLAIN_TOKEN"]
    if not hmac.compare_digest(request.headers.get("authorization", ""), wanted):
        raise HTTPException(401)
@app.get("/api/v1/jobs", dependencies=[Depends(known)])
async def jobs() -> dict[str, list[str]]:
    return {"jobs": []}
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
"""

PLAIN_GRPC = """
import asyncio, sys, grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
async def run():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()
asyncio.run(run())
"""


@dataclass(frozen=True)
class Server:
    """A server at a port, and one request to it, which tells whether it was answered."""

    process: subprocess.Popen[bytes]
    port: int
    ask: Callable[[], bool]


def free_ports() -> tuple[int, int]:
    """Two ports that nobody listens at now."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def asked_http(port: int, token: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/api/v1/jobs", headers={"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    except OSError:
        return False
    finally:
        connection.close()


def asked_grpc(port: int) -> bool:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True
            )
            return True
        except grpc.RpcError:
            return False


@contextlib.contextmanager
def ended(command: list[str], **more: str) -> Iterator[subprocess.Popen[bytes]]:
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
            raise SystemExit(f"the server at port {server.port} did not begin")
        time.sleep(0.1)
    return server


@contextlib.contextmanager
def site() -> Iterator[tuple[int, int, str, subprocess.Popen[bytes]]]:
    """A control plane: its ports for REST and gRPC, and its token."""
    rest, grpc_port = free_ports()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paramd_service.control"]
        command += ["--listen", f"127.0.0.1:{rest}", "--grpc-listen", f"127.0.0.1:{grpc_port}"]
        with ended(command, PARAMD_STATE_DIR=folder) as process:
            token = Path(folder, "_site", "token")
            deadline_s = time.monotonic() + PATIENCE_S
            while not token.exists() and time.monotonic() < deadline_s:
                time.sleep(0.1)
            yield rest, grpc_port, token.read_text().strip(), process


@contextlib.contextmanager
def pair(listener: str) -> Iterator[tuple[Server, Server]]:
    """Our server and the plain one."""
    port, _ = free_ports()
    code = PLAIN_HTTP if listener == "REST" else PLAIN_GRPC
    with (
        site() as (rest, grpc_port, token, ours),
        ended([sys.executable, "-c", code, str(port)], PLAIN_TOKEN=token) as plain,
    ):
        if listener == "REST":
            yield (
                until_asked(Server(ours, rest, lambda: asked_http(rest, token))),
                until_asked(Server(plain, port, lambda: asked_http(port, token))),
            )
        else:
            yield (
                until_asked(Server(ours, grpc_port, lambda: asked_grpc(grpc_port))),
                until_asked(Server(plain, port, lambda: asked_grpc(port))),
            )


@contextlib.contextmanager
def flooded(kind: str, port: int) -> Iterator[None]:
    """The flood, of two other users where this one is root."""
    running: list[subprocess.Popen[str]] = []
    try:
        for uid in USERS if kind != "none" else ():
            who = {"user": uid, "group": uid, "extra_groups": []} if os.geteuid() == 0 else {}
            process = subprocess.Popen(
                ["/usr/bin/python3", "-c", FLOOD, kind, str(port), str(HALF)],
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


def answered(server: Server, seconds: float) -> float:
    """Requests that were answered in a second."""
    good = 0
    begun_s = time.monotonic()
    # On a loaded machine one answer may take longer: it has to come, not to come soon.
    while (passed_s := time.monotonic() - begun_s) < seconds or (
        not good and passed_s < PATIENCE_S
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
    ratio: float
    """What is left of our rate without a flood, over what is left of the plain server's."""
    lives: bool
    """Whether both servers still ran."""

    def problem(self, *, strict: bool) -> str:
        """What is wrong; empty if the doors held. The ratio needs a calm machine (`strict`)."""
        if not self.lives:
            return "the server ended"
        if not self.ours_per_s:
            return "the owner had no answer"
        if strict and self.ratio < 0.5:
            return "the owner had less than half of the plain server's rate"
        return ""


def rows(listener: str, kinds: Sequence[str], seconds: float) -> Iterator[Row]:
    """Measure one listener; the first of `kinds` is without a flood."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), hard))
    with pair(listener) as (ours, plain):
        alone: tuple[float, float] | None = None
        for kind in kinds:
            found = []
            for server in (ours, plain):
                with flooded(kind, server.port):
                    found.append(answered(server, seconds))
                time.sleep(0.2)
            mine, theirs = found
            alone = alone if alone is not None else (mine, theirs)
            kept, plain_kept = mine / max(alone[0], 1e-9), theirs / max(alone[1], 1e-9)
            yield Row(
                listener=listener,
                flood=kind,
                ours_per_s=mine,
                plain_per_s=theirs,
                ratio=kept / plain_kept if plain_kept else math.inf,
                lives=ours.process.poll() is None and plain.process.poll() is None,
            )
