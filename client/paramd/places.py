"""Where a job's processes find each other: the state dir and its contents.

    <state dir>/<job>/            0700, ours
        endpoint.json             0600: address of the job's control plane, and its token
        incarnation               0600: the last incarnation issued
        rank-<r>.sock             the sidecars' Unix sockets

The state dir is PARAMD_STATE_DIR, else $XDG_STATE_HOME/paramd, else ~/.local/state/paramd.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paramd.errors import ConflictError, UnreachableError, UsageError
from paramd.state_files import (
    check_job_name,
    host_id,
    is_job_name,
    job_dir,
    locked,
    process_start,
    replace,
    socket_path,
    state_dir,
    state_dir_errors,
)

__all__ = (
    "Endpoint",
    "check_job_name",
    "host_id",
    "job_dir",
    "last_incarnation",
    "next_incarnation",
    "process_start",
    "read_endpoint",
    "remove_endpoint",
    "running_jobs",
    "socket_path",
    "state_dir",
    "write_endpoint",
)

ENDPOINT_FILE = "endpoint.json"
INCARNATION_FILE, OLDER_FILE = "incarnation", "epoch"
"""The counter of a job's incarnations, and its name in older versions: it must never go back."""
MAX_ENDPOINT_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """How to reach a job's control plane. Holds a token: never log it."""

    url: str
    """Base URL of its REST API, for example "http://127.0.0.1:8470"."""
    token: str = field(repr=False)
    """Bearer token for the REST API."""
    pid: int
    """Process of the control plane."""
    job: str
    """Name of the job."""
    grpc_address: str
    """gRPC target "host:port" of the control plane."""
    incarnation: int = 0
    """Incarnation the control plane serves."""
    pid_start: int = 0
    """Start time of `pid` from /proc, to detect a reused pid; 0 unknown."""


def write_endpoint(endpoint: Endpoint) -> Path:
    """Replace the job's endpoint.json atomically.

    Raises:
        UsageError, ConflictError: as `job_dir`.
        ConflictError: a newer incarnation of the job is running.
    """
    path = job_dir(endpoint.job) / ENDPOINT_FILE
    # Locked from check to replace: a control plane that starts late must not hide a newer one.
    with state_dir_errors(), locked(path.parent):
        found = _load(path)
        if found is not None and found.incarnation > endpoint.incarnation and _alive(found):
            raise ConflictError(
                f"incarnation {found.incarnation} of job {found.job!r} is already running (pid "
                f"{found.pid}); this is incarnation {endpoint.incarnation}"
            )
        replace(path, json.dumps(asdict(endpoint), sort_keys=True) + "\n")
    return path


def remove_endpoint(endpoint: Endpoint) -> bool:
    """Remove the job's endpoint.json if it is still this one; return whether it did."""
    path = state_dir() / check_job_name(endpoint.job) / ENDPOINT_FILE
    try:
        with locked(path.parent):
            # A successor may have written its own meanwhile.
            if _load(path) != endpoint:
                return False
            path.unlink()
            return True
    except OSError:
        return False


def read_endpoint(job: str | None = None) -> Endpoint:
    """The control plane of `job`, or of the only running job when none is named.

    Endpoints whose process has ended are skipped.

    Raises:
        UsageError: not a job name, or several jobs are running and none was named.
        UnreachableError: no such job is running here.
    """
    if job is not None:
        found = _load(state_dir() / check_job_name(job) / ENDPOINT_FILE)
        if found is not None and _alive(found):
            return found
        ended = "has ended" if found is not None else "is not known here"
        raise UnreachableError(f"job {job!r} {ended}; {_next_step(running_jobs())}")
    running = running_jobs()
    if len(running) > 1:
        names = ", ".join(sorted(endpoint.job for endpoint in running))
        raise UsageError(f"several jobs run here: {names}; name one (job=, --job)")
    if not running:
        raise UnreachableError(f"no job runs here; {_next_step(running)}")
    return running[0]


def running_jobs() -> list[Endpoint]:
    """Endpoints in this user's state dir whose process is alive, ordered by job name."""
    try:
        paths = sorted(state_dir().iterdir())
    except OSError:
        return []
    loaded = (_load(path / ENDPOINT_FILE) for path in paths if is_job_name(path.name))
    return [endpoint for endpoint in loaded if endpoint is not None and _alive(endpoint)]


def next_incarnation(job: str, *, above: int = 0) -> int:
    """Issue the job's next incarnation: starts at 1, never repeats, durable when it returns.

    Args:
        above: The incarnation is also above this: the last one known to be issued elsewhere.

    Raises:
        UsageError: as `job_dir`.
        ConflictError: as `job_dir`, or the counter cannot be read.
    """
    directory = job_dir(job)
    path = directory / INCARNATION_FILE
    with state_dir_errors(), locked(directory):
        incarnation = max(_counted(path), above) + 1
        replace(path, f"{incarnation}\n")
    return incarnation


def last_incarnation(job: str, *, at_least: int = 0) -> int:
    """The last incarnation issued, 0 for none; raises the counter to `at_least`.

    Raises:
        UsageError, ConflictError: as `next_incarnation`.
    """
    directory = job_dir(job)
    path = directory / INCARNATION_FILE
    with state_dir_errors(), locked(directory):
        incarnation = _counted(path)
        if incarnation < at_least:
            incarnation = at_least
            replace(path, f"{incarnation}\n")
    return incarnation


def _counted(path: Path) -> int:
    try:
        text = path.read_text()
    except FileNotFoundError:
        older = path.with_name(OLDER_FILE)
        return 0 if path == older else _counted(older)
    if not re.fullmatch(r"[0-9]{1,18}\n?", text):
        raise ConflictError(
            f"{path} does not hold a number; write the job's last incarnation into it, "
            "or remove it when no process of the job is left"
        )
    return int(text)


def _load(path: Path) -> Endpoint | None:
    """The endpoint in a file private to us; None when there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        # If others could write the file, they could redirect our calls to themselves.
        private = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
        if not (stat.S_ISREG(found.st_mode) and private):
            return None
        return _parse(file.read(MAX_ENDPOINT_BYTES), path.parent.name)


def _parse(text: bytes, job: str) -> Endpoint | None:
    try:
        endpoint = Endpoint(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (endpoint.url, endpoint.token, endpoint.grpc_address)
    numbers = (endpoint.pid, endpoint.incarnation, endpoint.pid_start)
    typed = all(isinstance(t, str) for t in texts) and all(type(n) is int for n in numbers)
    return endpoint if typed and endpoint.job == job and endpoint.pid > 0 else None


def _alive(endpoint: Endpoint) -> bool:
    start = process_start(endpoint.pid)
    return start != 0 and endpoint.pid_start in (0, start)


def _next_step(running: list[Endpoint]) -> str:
    if running:
        return f"jobs that run here: {', '.join(endpoint.job for endpoint in running)}"
    return (
        "start one with paramd.attach(model, optimizer, job=...), or say where it is "
        "(url and token, PARAMD_URL and PARAMD_TOKEN); state dir searched: " + str(state_dir())
    )
