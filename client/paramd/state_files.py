"""This host and its state dir: private job directories, atomically replaced files."""

from __future__ import annotations

import errno
import fcntl
import grp
import hashlib
import logging
import mmap
import os
import pwd
import re
import socket
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from paramd.errors import ConflictError, NotFoundError, UsageError

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

log = logging.getLogger("paramd")

FILE_NAME = "paramd.toml"
MAX_TOML_BYTES = 1 << 20

HOST_SOCKET = "host.sock"
"""Socket of `paramd sidecar host`, in `sidecars_dir`."""

MAX_LOG_LINES = 1000
"""Most last lines of a log in one answer."""

MAX_TAIL_BYTES = 256 << 10
MAX_LINE_CHARS = 2000


def check_private(path: Path) -> None:
    """Raise UsageError if every user of the machine can read a secret's file.

    A missing file passes, and so does one readable by a group: a pod gets its secrets that way.
    """
    with suppress(OSError):
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and found.st_mode & 0o007:
            raise UsageError(
                f"{path} holds a secret, and every user of this machine can read it (mode "
                f"{stat.S_IMODE(found.st_mode):04o}); run: chmod 600 {path}"
            )


@cache
def host_id() -> str:
    """Names this process's running kernel and network namespace: "KERNEL/NETWORK".

    Processes on one kernel can share memory, even across containers; those in one network see
    each other as the same host, loopback included.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def kernel_of(host: str) -> str:
    """The kernel part of a host id."""
    return host.partition("/")[0]


def same_network(one: str, other: str) -> bool:
    """Whether processes with these host ids share loopback, as far as both are known."""
    networks = {one.partition("/")[2], other.partition("/")[2]} - {""}
    return kernel_of(one) == kernel_of(other) and len(networks) < 2


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when it has ended or never was.

    With the pid it identifies a process uniquely, since pids are reused. A zombie has ended.
    """
    # The command name may contain spaces and parentheses; after the last one, fields are regular.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19]) if fields[0] not in "ZX" else 0


def resident_bytes(pid: int) -> int:
    """The process's resident memory; 0 if it cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


def home_dir() -> Path:
    """The user's home; "/" for an account without one, as container engines do."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def state_dir() -> Path:
    """The state dir's path; nothing is created."""
    named = os.environ.get("PARAMD_STATE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    xdg = os.environ.get("XDG_STATE_HOME")
    base = Path(xdg) if xdg and os.path.isabs(xdg) else home_dir() / ".local" / "state"
    return base / "paramd"


def is_job_name(name: str) -> bool:
    """Whether this is a valid job name, safe as a directory name."""
    return _JOB_NAME.fullmatch(name) is not None


def check_job_name(job: str) -> str:
    """Return `job` if it is a valid job name, else raise UsageError."""
    if not is_job_name(job):
        raise UsageError(
            f"job: {job!r} is not a job name; expected 1 to 64 of A-Z a-z 0-9 . _ - "
            "beginning with a letter or digit"
        )
    return job


def job_dir(job: str) -> Path:
    """The job's directory, 0700 and ours, created if missing.

    Raises:
        UsageError: If `job` is no job name or the state dir cannot be written.
        ConflictError: If the directory belongs to another user or is open to others.
    """
    path = state_dir() / check_job_name(job)
    with state_dir_errors():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _check_private(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} is not writable")
    return path


def sidecars_dir() -> Path:
    """Directory where trainers find the starter of their sidecars; 0700, created if missing.

    No job can have this name. Raises as `job_dir`.
    """
    path = state_dir() / "_sidecars"
    with state_dir_errors():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path)
    return path


def beside_port(ip: str, port: int) -> Path:
    """The Unix socket at which a server of this user listens beside a port of a loopback IP.

    Its folder is 0700, so nobody else can take its place, as they can a port that is free. The
    name has the network namespace and the IP in it: a shared state dir knows several loopbacks,
    and each has many addresses, whose ports are different ones.
    """
    network = hashlib.sha256(f"{host_id()} {ip}".encode()).hexdigest()[:12]
    return state_dir() / "_sockets" / f"{network}-{port}"


def sockets_dir() -> Path:
    """Directory of `beside_port`; 0700, created if missing. No job can have this name.

    Raises as `job_dir`.
    """
    path = state_dir() / "_sockets"
    with state_dir_errors():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path)
    return path


def socket_path(job: str, rank: int) -> Path:
    """The socket's path, perhaps too long for sun_path; UsageError: no job name, or no rank."""
    if rank < 0:
        raise UsageError(f"rank: {rank}; expected 0 or more")
    return state_dir() / check_job_name(job) / f"rank-{rank}.sock"


def log_path(job: str, rank: int) -> Path:
    """Path of the log of one rank's sidecars, of all incarnations. Raises as `socket_path`."""
    return socket_path(job, rank).with_suffix(".log")


def lines_of_log(job: str, rank: int, count: int) -> list[str]:
    """The last lines that the sidecars of a rank have logged on this host.

    Raises:
        UsageError: As `socket_path`.
        NotFoundError: If there is no such file, or it cannot be read.
    """
    path = log_path(job, rank)
    try:
        with opened(path) as descriptor:
            return last_lines(descriptor, count)
    except OSError as error:
        raise NotFoundError(
            f"no log of rank {rank} of job {job!r} on this host ({path}: {error.strerror}); it is "
            "in the state dir of the host that the rank ran on"
        ) from None


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file within the block; OSError for a link or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def last_lines(descriptor: int, count: int) -> list[str]:
    """The last lines of an open regular file, the newest last.

    At most `count`, of the last `MAX_TAIL_BYTES`, each cut to `MAX_LINE_CHARS`. The file's position
    stays where it is.

    Raises:
        OSError: If it cannot be read.
    """
    begin = max(os.fstat(descriptor).st_size - MAX_TAIL_BYTES, 0)
    found = os.pread(descriptor, MAX_TAIL_BYTES, begin).decode(errors="replace").split("\n")
    # Without the empty end of the last line, and without a first one that begins in its middle.
    lines = found if found[-1] else found[:-1]
    lines = lines[1:] if begin and len(lines) > 1 else lines
    # A progress bar writes over its line again and again: what a terminal would show of it.
    return [line.rstrip("\r").rpartition("\r")[2][:MAX_LINE_CHARS] for line in lines[-count:]]


def replace(path: Path, data: str | bytes, *, mode: int = 0o600) -> None:
    """Write a file so that readers see the old or the new one; durable when it returns."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            # Before the rename, or a crash could leave the new name on an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    # The rename itself is durable only once its directory is.
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on the directory, across processes, for the block."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def state_dir_errors() -> Iterator[None]:
    """Turn an OSError into a UsageError with a remedy."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the state dir {state_dir()} cannot be used: {error}; set PARAMD_STATE_DIR "
            "to a directory that this user can write"
        ) from error


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConflictError(f"{path} is not a directory; remove it or set PARAMD_STATE_DIR")
    if found.st_uid != os.geteuid():
        raise ConflictError(
            f"{path} belongs to uid {found.st_uid}, not to {os.geteuid()}; set PARAMD_STATE_DIR"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConflictError(
            f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"run: chmod 700 {path}"
        )


def file_places() -> list[tuple[Path, bool]]:
    """Places of paramd.toml in order of precedence, and whether each is the user's own."""
    base = os.environ.get("XDG_CONFIG_HOME")
    config = Path(base) if base and os.path.isabs(base) else home_dir() / ".config"
    return [(Path(FILE_NAME), False), (config / "paramd" / FILE_NAME, True)]


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says; nothing if there is none, or if it is not this user's to believe.

    A file that belongs to another user, or that others may write, could send our token to its
    owner: a warning names it and says why it is ignored.

    Raises:
        UsageError: If it is not TOML or cannot be read.
    """
    try:
        with path.open("rb") as file:
            distrust = _distrust(path, os.fstat(file.fileno()))
            text = "" if distrust else file.read(MAX_TOML_BYTES + 1).decode()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if distrust:
        _tell_ignored(path.absolute(), distrust)
        return {}
    if len(text) > MAX_TOML_BYTES:
        raise UsageError(f"{path} is over {MAX_TOML_BYTES >> 20} MiB, too large for settings")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


def _distrust(path: Path, found: os.stat_result) -> str:
    """Why a file of settings is not believed; "" if it is.

    `found` is of the open file, since the name may lead to another one by now. A link counts like
    the file that it leads to: whoever owns it chose that file.
    """
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    for uid in (path.lstat().st_uid, found.st_uid):
        if uid not in _own_uids():
            return f"it belongs to uid {uid}, not to you or root; use a copy of your own"
    if found.st_mode & stat.S_IWOTH:
        return f"every user of this machine may write it; run: chmod o-w {path}"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"its group (gid {found.st_gid}) may write it; run: chmod g-w {path}"
    return ""


def _own_uids() -> set[int]:
    """Root's uid, ours, and under sudo that of the user who called it."""
    own = {0, os.geteuid()}
    caller = os.environ.get("SUDO_UID", "")
    # Others cannot set root's environment; a user who sets it has only their own rights.
    if os.geteuid() == 0 and caller.isascii() and caller.isdigit():
        own.add(int(caller))
    return own


def _is_own_group(gid: int) -> bool:
    """Whether a group has no member but us: root's, or the one named after its only user."""
    if gid == 0:
        return True
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    members = set(group.gr_mem) - {user.pw_name}
    return group.gr_name == user.pw_name and user.pw_gid == gid and not members


@cache
def _tell_ignored(path: Path, why: str) -> None:
    """Once for each file: settings are read several times in one command."""
    log.warning("paramd: %s is ignored: %s", path, why)
