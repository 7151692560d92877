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
import select
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from typer import Argument, Option

from paramd import helpers
from paramd.answers import parsed_json, said
from paramd.bounds import REMOTE_ENDPOINT, OverBoundError
from paramd.cli import completion
from paramd.cli.options import PANEL
from paramd.cli.shell import say
from paramd.errors import UnreachableError, UsageError

START_S = 30.0
"""How long, in seconds, SSH and the other host's paramd may take, typing a password included."""

POLL_S = 0.1
END_S = 5.0
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
                listeners = [listener, *([beside] if beside is not None else [])]
                asyncio.run(_carry(listeners, way, process))
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


def _listening(port: int) -> socket.socket:
    """Our own listener on a loopback port; 0 takes a free one. Raises UsageError: it is in use."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}; name another one, or none") from error


async def _carry(
    listeners: Sequence[socket.socket], way: Path, process: subprocess.Popen[bytes]
) -> None:
    """Carry all connections of the listeners to the Unix socket until SSH has ended."""
    from paramd.mesh.peers.relay import carried

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                await carried((reader, writer), await asyncio.open_unix_connection(way))
        finally:
            writer.close()

    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    # Not a thread that waits: Ctrl-C could not end it.
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        async with AsyncExitStack() as servers:
            for listener in listeners:
                await servers.enter_async_context(await asyncio.start_server(one, sock=listener))
            await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    process.wait()


def _endpoint(ssh: list[str], host: str, remote: list[str], job: str | None) -> Any:
    """The endpoint that the other host's paramd shows."""
    from paramd.places import Endpoint, check_job_name

    command = [*remote, "connect", "--show", *(["--job", job] if job is not None else [])]
    try:
        returncode, told = said([*ssh, host, shlex.join(command)], REMOTE_ENDPOINT)
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
