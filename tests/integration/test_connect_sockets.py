"""`paramd connect` goes from Unix socket to Unix socket: on neither host does anybody get the token
who takes a port. SSH is a program here that forwards as `ssh -L` does; `scenes/test_hosts.py` has
a real one."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from paramd import places
from paramd.mesh.peers.control import RestClient
from paramd.security import loopback, near
from tests.integration.control_process import JOB, TOKEN, control_plane

PATIENCE_S = 60.0
DESCRIPTORS = 256

SSH = """
import asyncio, subprocess, sys
words = sys.argv[1:]
if "-N" not in words:
    sys.exit(subprocess.run(words[-1], shell=True).returncode)
async def pour(reader, writer):
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
    writer.close()
async def forward(way, target):
    async def one(reader, writer):
        try:
            if target.startswith("/"):
                if {refuses}:
                    raise OSError("sockets are not forwarded here")
                far = await asyncio.open_unix_connection(target)
            else:
                host, _, port = target.rpartition(":")
                far = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pour(reader, far[1]), pour(far[0], writer), return_exceptions=True)
    return await asyncio.start_unix_server(one, way)
async def main():
    ways = [words[at + 1].split(":", 1) for at, word in enumerate(words) if word == "-L"]
    servers = [await forward(*way) for way in ways]
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextmanager
def connected(
    folder: Path, *, refuses: bool, descriptors: int | None = None
) -> Iterator[places.Endpoint]:
    """`paramd connect` of another machine, whose state dir is `folder`; the endpoint it writes.

    `descriptors`: the most that it and its SSH may have.
    """
    script = folder / "ssh.py"
    script.write_text(SSH.replace("{refuses}", str(refuses)))
    ssh, paramd = f"{sys.executable} {script}", f"{sys.executable} -m paramd.cli"
    remote = f"env PARAMD_STATE_DIR={os.environ['PARAMD_STATE_DIR']} {paramd}"
    command = [*paramd.split(), "connect", "far", "--job", JOB, "--ssh", ssh, "--remote", remote]
    there = os.environ | {"PARAMD_STATE_DIR": str(folder)}
    if descriptors is not None:
        command = ["prlimit", f"--nofile={descriptors}", *command]
    process = subprocess.Popen(command, env=there, stderr=subprocess.PIPE, text=True)
    try:
        file, deadline_s = folder / JOB / places.ENDPOINT_FILE, time.monotonic() + PATIENCE_S
        while not file.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        yield places.Endpoint(**json.loads(file.read_text()))
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)


def test_what_the_other_host_says_drives_no_terminal(tmp_path: Path) -> None:
    script = tmp_path / "ssh.py"
    script.write_text(
        "import os\nos.write(2, b'all ranks \\x1b]0;healthy\\x07\\nno job\\n')\nexit(1)"
    )
    command = [sys.executable, "-m", "paramd.cli", "connect", "far"]
    command += ["--ssh", f"{sys.executable} {script}"]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert b"no job" in done.stderr
    assert b"\x1b" not in done.stderr
    assert b"\x07" not in done.stderr


@pytest.mark.parametrize("refuses", [False, True])
def test_a_connection_uses_ports_on_neither_host(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    async def ask(mine: str, theirs: str) -> tuple[int, int]:
        """Connections at both ports while a client asks."""
        client = RestClient(mine, TOKEN)
        try:
            assert await client.jobs() == [JOB]
            return seen_at(mine), seen_at(theirs)
        finally:
            await client.close()

    # A socket's path has at most 107 bytes, and pytest's folders are long.
    with (
        tempfile.TemporaryDirectory(prefix="laptop-") as name,
        control_plane() as control,
        connected(Path(name), refuses=refuses) as mine,
    ):
        folder = Path(name)
        assert mine.socket.startswith(str(folder))
        monkeypatch.setenv("PARAMD_STATE_DIR", str(folder))
        # Where SSH may not forward to sockets, the port there is used, as before.
        assert asyncio.run(ask(mine.url, control.url)) == (0, int(refuses))


def seen_at(url: str) -> int:
    """Connections at a loopback port."""
    at = (loopback.plain_ip("127.0.0.1"), urlsplit(url).port)
    return sum(here == at and state == "01" for here, _, state, _ in loopback._sockets())


def test_a_crowd_at_the_port_does_not_keep_the_owner_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lives on this host may open connections, and keep them."""

    async def ask(url: str) -> list[str]:
        client = RestClient(url, TOKEN)
        try:
            return await client.jobs()
        finally:
            await client.close()

    with (
        tempfile.TemporaryDirectory(prefix="laptop-") as name,
        control_plane(),
        connected(Path(name), refuses=False, descriptors=DESCRIPTORS) as mine,
        ExitStack() as crowd,
    ):
        at = ("127.0.0.1", urlsplit(mine.url).port)
        for number in range(2 * DESCRIPTORS):
            one = crowd.enter_context(socket.create_connection(at, PATIENCE_S))
            if number % 2:
                with suppress(ConnectionError):
                    one.sendall(b"GET / HT")
        monkeypatch.setenv("PARAMD_STATE_DIR", name)
        for _ in range(3):
            assert asyncio.run(ask(mine.url)) == [JOB], "at the socket"
        monkeypatch.setattr(near, "socket_beside", lambda *_: "")
        assert asyncio.run(ask(mine.url)) == [JOB], "at the port"
