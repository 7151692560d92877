"""Each listener under each flood, beside a plain server of its kind in the same run:

    python -m tests.doors [--seconds 3] [LISTENER ...]

As root it takes three users: the servers and their owner (this user), and the floods (65534 and
65533), each at half of the strength. A row says how many of the owner's requests were answered in
these seconds, each over a connection of its own, and how many of the plain server's, which has no
doors of its own: uvicorn, or gRPC's server. All servers have 256 descriptors.

A row fails (and the program with 1) where the owner was answered at less than half of the plain
server's rate under that flood, taken from what each answers without one; or where a server ended.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
import sys, uvicorn
from fastapi import FastAPI
app = FastAPI()
@app.get("/api/v1/jobs")
async def jobs():
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
        ended([sys.executable, "-c", code, str(port)]) as plain,
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


def answered(server: Server, seconds: float) -> tuple[float, int]:
    """(requests answered in a second, requests that were not)."""
    good = bad = 0
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < seconds:
        if server.ask():
            good += 1
        else:
            bad += 1
    return good / (time.monotonic() - begun_s), bad


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("listeners", nargs="*", default=["REST", "gRPC"])
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    # Of this program itself, which is the owner.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), hard))
    failed = 0
    print(f"{'listener':9} {'flood':18} {'ours/s':>8} {'lost':>5} {'plain/s':>8} {'lost':>5}")
    for listener in given.listeners:
        with pair(listener) as (ours, plain):
            alone: tuple[float, float] | None = None
            for kind in FLOODS:
                found = []
                for server in (ours, plain):
                    with flooded(kind, server.port):
                        found.append(answered(server, given.seconds))
                    time.sleep(0.5)
                (mine, lost), (theirs, plain_lost) = found
                alone = alone if alone is not None else (mine, theirs)
                kept = mine / max(alone[0], 1e-9)
                plain_kept = theirs / max(alone[1], 1e-9)
                good = kept >= plain_kept / 2 and ours.process.poll() is None and mine > 0
                failed += not good
                print(
                    f"{listener:9} {kind:18} {mine:8.1f} {lost:5} {theirs:8.1f} {plain_lost:5}"
                    f"  {'held' if good else 'FAILED'}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
