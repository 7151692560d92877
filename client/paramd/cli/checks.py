"""What `paramd doctor` looks at on this machine. Every check only looks; none changes anything."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from paramd import places
from paramd.errors import ExhaustedError

DEFAULT_PORT = 8470
LITTLE_MEMORY_BYTES = 1 << 30

FLOORS = {
    "grpcio": "1.71.2",
    "protobuf": "5.29.6",
    "httpx2": "2.16",
    "xxhash": "3.5",
    "torch": "2.10",
    "fastapi": "0.136",
    "starlette": "1.3.1",
    "uvicorn": "0.30",
}
"""Oldest versions that work or that have no known hole; the same as in pyproject.toml."""

EXTRAS = {"torch": "torch", "fastapi": "service", "starlette": "service", "uvicorn": "service"}
"""Packages that a part of the users needs, and the extra that brings them."""


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    detail: str
    advice: str = ""
    """What to do; empty only when all is well."""


def machine() -> Iterator[Finding]:
    """All checks of this machine, in order. A check that breaks is a finding, not an error."""
    for name, check in _CHECKS:
        try:
            yield from check()
        except Exception as error:
            yield Finding(
                check=name,
                verdict=Verdict.FAILED,
                detail=f"{type(error).__name__}: {error}",
                advice="the check itself broke; run with --debug and report it",
            )


def _python() -> Iterator[Finding]:
    found = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= (3, 11)
    yield _finding("python", good, found, "install Python 3.11 or newer")


def _packages() -> Iterator[Finding]:
    for name, floor in FLOORS.items():
        extra = EXTRAS.get(name)
        install = f"pip install 'paramd[{extra}]'" if extra else "pip install paramd"
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            verdict = Verdict.WARNING if extra else Verdict.FAILED
            use = "to summon and to train" if name == "torch" else "to serve"
            yield Finding(
                check=name,
                verdict=verdict,
                detail="not installed",
                advice=f"needed {use if extra else 'always'}: {install}",
            )
            continue
        good = release(found) >= release(floor)
        yield _finding(name, good, found, f"{floor} or newer is needed: {install} --upgrade")


def release(version: str) -> tuple[int, ...]:
    """The numbers a version begins with: "2.13.0+cpu" is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _state_dir() -> Iterator[Finding]:
    path = places.state_dir()
    if not path.exists():
        parent = next(p for p in path.parents if p.exists())
        yield _finding(
            "state dir",
            os.access(parent, os.W_OK | os.X_OK),
            f"{path} will be made",
            f"{parent} is not writable: set PARAMD_STATE_DIR to a directory of yours",
        )
        return
    found = path.stat()
    if found.st_uid != os.geteuid():
        problem = "belongs to another user: set PARAMD_STATE_DIR to a directory of yours"
    elif not os.access(path, os.W_OK | os.X_OK):
        problem = f"is not writable: chmod u+rwx {path}"
    elif stat.S_IMODE(found.st_mode) & 0o022:
        problem = f"can be changed by others: chmod go-w {path}"
    else:
        problem = ""
    yield _finding("state dir", not problem, str(path), problem)
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and stat.S_IMODE(entry.stat().st_mode) & 0o077:
            yield _finding("job dir", False, f"{entry} is open to others", f"chmod 700 {entry}")


def _memory() -> Iterator[Finding]:
    from paramd.memory import descriptors

    available = descriptors.available_bytes()
    yield Finding(
        check="shared memory",
        verdict=Verdict.OK if available >= LITTLE_MEMORY_BYTES else Verdict.WARNING,
        detail=f"{available / 1e9:,.1f} GB may be taken",
        advice=""
        if available >= LITTLE_MEMORY_BYTES
        else "each rank needs its parameters' bytes twice; raise the container's memory limit",
    )
    try:
        descriptor = descriptors.create_memory("paramd-doctor", mmap.PAGESIZE)
    except ExhaustedError as error:
        yield _finding("memfd", False, str(error), "free memory or raise the limit")
        return
    try:
        os.close(descriptors.wake_event())
        os.close(descriptors.pidfd(os.getpid()))
        yield _finding("memfd, eventfd, pidfd", True, "work", "")
        yield _finding("SCM_RIGHTS", _passes(descriptor), "descriptors change hands", _SECCOMP)
    finally:
        os.close(descriptor)


_SECCOMP = "the container's seccomp profile or sandbox forbids it; allow sendmsg with descriptors"


def _passes(descriptor: int) -> bool:
    """Whether a descriptor of shared memory survives the way through a Unix socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [descriptor])
        _, received, _, _ = socket.recv_fds(theirs, 1, 1)
    if not received:
        return False
    with mmap.mmap(descriptor, mmap.PAGESIZE) as mine:
        mine[0] = 7
    try:
        with mmap.mmap(received[0], mmap.PAGESIZE) as other:
            return other[0] == 7
    finally:
        os.close(received[0])


def _port() -> Iterator[Finding]:
    """REST's default port and gRPC's, which is the next one."""
    mine: dict[str, str] = {}
    for job in places.running_jobs():
        for address in (job.url, job.grpc_address):
            mine[address.rpartition(":")[2]] = job.job
    for port in (DEFAULT_PORT, DEFAULT_PORT + 1):
        yield _one_port(port, mine)


def _one_port(port: int, mine: Mapping[str, str]) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            detail, free = "free", True
        except OSError as error:
            job = mine.get(str(port))
            free = job is not None
            detail = f"serves job {job}" if job is not None else f"taken ({error.strerror})"
    return Finding(
        check=f"port {port}",
        verdict=Verdict.OK if free else Verdict.WARNING,
        detail=detail,
        advice=""
        if free
        else "the next free port is used instead; to choose one set PARAMD_LISTEN=127.0.0.1:PORT",
    )


def _clock() -> Iterator[Finding]:
    installed_s = Path(__file__).stat().st_mtime
    now_s = time.time()
    good = now_s > installed_s - 86_400
    detail = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    yield _finding(
        "clock", good, detail, "it is before paramd was installed, tickets will not fit: set it"
    )
    with suppress(OSError):
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        yield _finding("clock source", True, source.read_text().strip(), "")


def _finding(check: str, good: bool, detail: str, advice: str) -> Finding:
    verdict = Verdict.OK if good else Verdict.FAILED
    return Finding(check=check, verdict=verdict, detail=detail, advice="" if good else advice)


_CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("python", _python),
    ("packages", _packages),
    ("state dir", _state_dir),
    ("memory", _memory),
    ("port", _port),
    ("clock", _clock),
)
