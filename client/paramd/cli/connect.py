"""`paramd connect`: a job on another host becomes one of this host's, over one SSH connection.

It asks that host's own paramd for the job's endpoint, forwards the control plane's port, and writes
a separate endpoint into this host's state dir while it runs. So every command, and
`paramd.connect(job=...)`, find the job as if it ran here; sidecars are reached through that port.

SSH forwards from a Unix socket in a folder that only this user may enter. A port would be free for
any user of this host while SSH signs in, and again when it ends; the one that browsers need is this
process's own from before SSH begins until the endpoint is gone. On the other host, SSH connects to
the control plane's Unix socket, for the same reason, where there is one and SSH may.
"""

import asyncio
import json
import os
import re
import resource
import select
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from typer import Argument, Option

from paramd import helpers
from paramd.accepting import AT_ONCE, Listener
from paramd.answers import parsed_json, said
from paramd.bounds import REMOTE_ENDPOINT, OverBoundError
from paramd.cli import completion
from paramd.cli.options import PANEL
from paramd.cli.parts import RUN, CommandPart, Commands
from paramd.cli.shell import say
from paramd.errors import UnreachableError, UsageError

START_S = 30.0
"""How long, in seconds, SSH and the other host's paramd may take, typing a password included."""

POLL_S = 0.1
END_S = 5.0
HEAD_S = 10.0
"""Seconds for a connection to send its first bytes, as the control plane has it."""

ANSWER_S = 5.0
"""Seconds for the control plane to answer through SSH."""
_ANSWER = b"HTTP/1.1 200"


def connect(
    host: Annotated[
        str | None,
        Argument(
            metavar="[USER@]HOST",
            help="Where SSH reaches the job's first host, or a "
            "login node that shares its state dir.",
        ),
    ] = None,
    job: Annotated[
        str | None,
        Option(
            "--job",
            metavar="NAME",
            help="Name of the job; required if several run there. \\[env: PARAMD_JOB]",
            autocompletion=completion.jobs,
        ),
    ] = None,
    port: Annotated[
        int, Option("--port", min=0, max=65535, help="Local port; 0 picks a free one.")
    ] = 0,
    ssh: Annotated[
        str, Option("--ssh", metavar="COMMAND", help="How to call SSH, with its options.")
    ] = "ssh",
    remote: Annotated[
        str, Option("--remote", metavar="COMMAND", help="How to call paramd there.")
    ] = "paramd",
    show: Annotated[
        bool,
        Option(
            "--show",
            help="Print the endpoint of a job here, token included, as JSON, "
            "and end. What the other side of a connection runs.",
            rich_help_panel=PANEL,
        ),
    ] = False,
) -> None:
    """Connect to a job on another host over SSH; runs until Ctrl-C.

    While it runs, all commands on this machine find the job by its name. Only
    the control plane's port is forwarded; its certificate is checked against
    the job's own CA, which is read from that host. The token travels within
    SSH and never appears in an argument. A job that lives on this machine is
    never replaced by one of the same name there.
    """
    job = job if job is not None else os.environ.get("PARAMD_JOB") or None
    if show:
        from paramd.places import read_endpoint

        print(json.dumps(asdict(read_endpoint(job))))
        return
    if host is None or host.startswith("-"):
        raise UsageError("HOST is missing; for example: paramd connect me@login.example")
    _connect(shlex.split(ssh), host, shlex.split(remote), job, port)


def _connect(ssh: list[str], host: str, remote: list[str], job: str | None, port: int) -> None:
    from paramd import places
    from paramd.security.loopback import listener_beside

    found = _endpoint(ssh, host, remote, job)
    target = urlsplit(found.url)
    with _listening(port) as listener, tempfile.TemporaryDirectory(prefix="paramd-") as folder:
        there = f"[{target.hostname}]" if ":" in (target.hostname or "") else target.hostname
        way, near = Path(folder, "control.sock"), Path(folder, "near.sock")
        forwards = ["-L", f"{way}:{there}:{target.port}"]
        if _is_plain_path(found.socket):
            # Before the other one, whose socket says that SSH has begun.
            forwards = ["-L", f"{near}:{found.socket}", *forwards]
        options = ["-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15"]
        process = subprocess.Popen([*ssh, "-N", *options, *forwards, host])
        at_port = int(listener.getsockname()[1])
        beside = listener_beside("127.0.0.1", at_port)
        try:
            _wait_for(process, way, host)
            # A host may forbid that SSH connects to sockets, or run an older paramd.
            way = near if _is_answered(near) else way
            mine = replace(
                found,
                url=f"{target.scheme}://127.0.0.1:{at_port}",
                socket=beside.getsockname() if beside is not None else "",
                pid=os.getpid(),
                pid_start=places.process_start(os.getpid()),
                host_id=places.host_id(),
                via=host,
            )
            places.write_endpoint(mine)
            try:
                checked = f"; its CA is {found.ca_pin[:23]}..., as {mine.job!r} says"
                say(f"connected to job {mine.job!r} at {mine.url}{checked if found.ca_pin else ''}")
                say(
                    f"in another terminal: paramd status --job {mine.job}; "
                    "Ctrl-C ends the connection"
                )
                asyncio.run(_carry(listener, beside, way, process))
            finally:
                places.remove_endpoint(mine)
            raise UnreachableError(
                f"SSH to {host} ended (code {process.returncode}); connect again"
            )
        finally:
            process.terminate()
            helpers.end(process, grace_s=END_S)
            if beside is not None:
                beside.close()


def _is_plain_path(text: object) -> bool:
    """Whether SSH takes this for the path of a socket: the other host may say anything."""
    return isinstance(text, str) and re.fullmatch(r"/[A-Za-z0-9._/@+-]{1,106}", text) is not None


def _is_answered(way: Path) -> bool:
    """Whether a control plane answers at the other end of a forwarded socket."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.settimeout(ANSWER_S)
        probe.connect(str(way))
        probe.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        return probe.recv(len(_ANSWER)) == _ANSWER
    return False


def _listening(port: int) -> Listener:
    """Our own listener on a loopback port; 0 takes a free one. Raises UsageError: it is in use."""
    listener = Listener(socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.keep_backlog()
    except OSError as error:
        listener.close()
        raise UsageError(f"--port {port}: {error.strerror}; name another one, or none") from error
    return listener


class _Carrier:
    """Carries connections to a Unix socket. Event loop only.

    Any user of this host may open connections at the port. Those are a crowd that has a quarter of
    all descriptors, two for each; past that, and when no descriptor is left, the one that has been
    silent for longest goes. The owner's socket lies in a folder that nobody else may enter, so its
    connections are no part of the crowd.
    """

    def __init__(self, way: Path) -> None:
        self._way = way
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        self._crowd: dict[asyncio.StreamWriter, None] = {}
        """The one that has been silent for longest first."""
        self._open: set[asyncio.StreamWriter] = set()

    def close(self) -> None:
        """End all connections: a server that closes waits for them, from Python 3.12 on."""
        for writer in self._open:
            writer.transport.abort()

    def make_room(self) -> bool:
        """End the one of the crowd that has been silent for longest; False: there is none."""
        if not self._crowd:
            return False
        silent = next(iter(self._crowd))
        del self._crowd[silent]
        silent.transport.abort()
        return True

    async def carry_a_strangers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry a connection that anybody may have opened."""
        self._crowd[writer] = None
        if len(self._crowd) > self._most:
            self.make_room()

        def heard() -> None:
            if writer in self._crowd:
                del self._crowd[writer]
                self._crowd[writer] = None

        try:
            await self._carry(reader, writer, heard)
        finally:
            self._crowd.pop(writer, None)

    async def carry_the_owners(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry a connection that only this user can have opened."""
        await self._carry(reader, writer, lambda: None)

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heard: Callable[[], None],
    ) -> None:
        from paramd.mesh.peers.relay import PART_BYTES, carried

        self._open.add(writer)
        try:
            with suppress(OSError, TimeoutError):
                # In HTTP and TLS the client speaks first: one that is silent costs nothing there.
                first = await asyncio.wait_for(reader.read(PART_BYTES), HEAD_S)
                if not first:
                    return
                heard()
                far = await asyncio.open_unix_connection(self._way)
                far[1].write(first)
                await carried((reader, writer), far, heard=heard)
        finally:
            self._open.discard(writer)
            writer.close()


async def _carry(
    listener: Listener,
    beside: socket.socket | None,
    way: Path,
    process: subprocess.Popen[bytes],
) -> None:
    """Carry all connections of the port and of the owner's socket to `way` until SSH has ended."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    carrier = _Carrier(way)
    listener.on_full = carrier.make_room
    # Not a thread that waits: Ctrl-C could not end it.
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        async with AsyncExitStack() as servers:
            await servers.enter_async_context(
                await asyncio.start_server(
                    carrier.carry_a_strangers, sock=listener, backlog=AT_ONCE
                )
            )
            listener.keep_backlog()
            if beside is not None:
                await servers.enter_async_context(
                    await asyncio.start_server(carrier.carry_the_owners, sock=beside)
                )
            try:
                await ended.wait()
            finally:
                carrier.close()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    process.wait()


def _endpoint(ssh: list[str], host: str, remote: list[str], job: str | None) -> Any:
    """The endpoint that the other host's paramd shows."""
    from paramd.places import Endpoint, check_job_name

    command = [*remote, "connect", "--show", *(["--job", job] if job is not None else [])]
    try:
        returncode, told = said([*ssh, host, shlex.join(command)], REMOTE_ENDPOINT, say)
    except FileNotFoundError:
        raise UsageError(f"{ssh[0]} is not installed; name another one with --ssh") from None
    except TimeoutError:
        raise UnreachableError(
            f"{host} did not answer within {REMOTE_ENDPOINT.within_s:.0f} s over SSH"
        ) from None
    except OverBoundError as error:
        raise UsageError(f"paramd on {host} did not print an endpoint: {error}") from None
    if returncode == 255:
        raise UnreachableError(f"SSH does not reach {host}; try: {ssh[0]} {host} true")
    if returncode == 127:
        raise UsageError(
            f"{remote[0]!r} is not found on {host}; give its path there with --remote, such as "
            "--remote '~/venv/bin/paramd'"
        )
    if returncode != 0:
        raise UnreachableError(f"paramd on {host} shows no job, see its message above")
    try:
        # The last line: a login shell may print a greeting before it.
        found = Endpoint(**parsed_json(told.splitlines()[-1], REMOTE_ENDPOINT))
        check_job_name(found.job)
    except (ValueError, TypeError, IndexError):
        raise UsageError(
            f"paramd on {host} did not print an endpoint; install the same version of paramd "
            "there and here"
        ) from None
    if job not in (None, found.job):
        raise UsageError(f"paramd on {host} shows job {found.job!r}; {job!r} was asked for")
    return found


def _wait_for(process: subprocess.Popen[bytes], way: Path, host: str) -> None:
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(way)) == 0:
                return
        select.select([], [], [], POLL_S)
    raise UnreachableError(f"SSH to {host} could not forward a port; see ssh's message above")


class Connect(CommandPart):
    """Jobs on other hosts."""

    name = "connect"

    def add_to(self, commands: Commands) -> None:
        commands.add(
            RUN, connect, "me@login.example", "gpu-17 --job my-run --remote '~/venv/bin/paramd'"
        )
