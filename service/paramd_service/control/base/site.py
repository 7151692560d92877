"""A control plane's files: its generation, a site's key and token, the history of incarnations.

A site has one key for all its jobs, from which each incarnation's key pair is derived. So a
restarted control plane recognizes the sidecars of every job without having recorded any.

    <state dir>/_site/          0700; no job can have this name
        key                     0600: 32 random bytes, hexadecimal
        token                   0600: the bearer token of the REST side
        generation              the last generation handed out
        control.clock           its clock, for a restarted control plane

The history of a job's incarnations is written here and read by `places.incarnations`.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paramd import bounds, clock, places
from paramd.answers import read_file
from paramd.errors import ConflictError, NotFoundError, ParamdError, UsageError
from paramd.places import HISTORY_FILE, IncarnationRecord
from paramd.security.tickets import GENERATION_STEP, new_token
from paramd.state_files import check_private
from paramd_service.aio import stopped

SITE_DIRECTORY = "_site"
KEY_BYTES = 32
MAX_FILE_BYTES = 1024
MIN_TOKEN_CHARS = 16

log = logging.getLogger("paramd.control")


class IncarnationNotes:
    """Writes the history off the event loop, one line at a time."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start writing, including lines queued before."""
        self._task = asyncio.create_task(self._run(), name="paramd-incarnations")

    def note(self, job: str, record: IncarnationRecord) -> None:
        """Queue a line for an incarnation that has begun or ended, or whose first rank died."""
        line: dict[str, Any] = {
            "incarnation": record.incarnation,
            "world_size": record.world_size,
            "began_s": record.began_s,
        }
        if record.ended_s is not None:
            line |= {"ended_s": record.ended_s, "reason": record.reason, "step": record.step}
        elif record.reason:
            line |= {"reason": record.reason, "step": record.step}
        self._lines.put_nowait((job, line))

    async def close(self) -> None:
        """Write what is queued, then stop."""
        if self._task is not None:
            await self._lines.join()
            await stopped(self._task)
            self._task = None

    async def _run(self) -> None:
        while True:
            job, line = await self._lines.get()
            try:
                await asyncio.to_thread(_append, job, line)
            except (OSError, ParamdError) as error:
                # The history is a convenience: the job continues without it.
                log.warning("the history of runs was not written: %s", error)
            finally:
                self._lines.task_done()


def _append(job: str, message: dict[str, Any]) -> None:
    path = places.job_dir(job) / HISTORY_FILE
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Site:
    key: bytes = field(repr=False)
    token: str = field(repr=False)

    def private_key(self, job: str, incarnation: int) -> bytes:
        """Key that signs the tickets of one incarnation of one job; deterministic."""
        return hmac.digest(
            self.key, f"paramd incarnation key\0{job}\0{incarnation}".encode(), hashlib.sha256
        )


def site_dir() -> Path:
    """The site's directory, created if missing; 0700 and ours.

    Raises:
        UsageError: If the state dir cannot be used.
        ConflictError: If the directory belongs to another user or is open to others.
    """
    path = places.state_dir() / SITE_DIRECTORY
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat(follow_symlinks=False)
    except OSError as error:
        raise UsageError(f"{path} cannot be used: {error}; set PARAMD_STATE_DIR") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConflictError(f"{path} belongs to or is open to other users; run: chmod 700 {path}")
    return path


def directory_of(job: str) -> Path:
    """Directory of the job's store: the job's own, else the site's of this state dir."""
    state = places.state_dir()
    if not (state / job).is_dir():
        raise NotFoundError(f"job {job!r} is not known here; state dir searched: {state}")
    directory = places.job_dir(job)
    site = state / SITE_DIRECTORY
    if not any(directory.glob("control.sqlite")) and site.is_dir():
        return site
    return directory


def open_site(token: str | None) -> Site:
    """The site's secrets, created if missing. Reads and writes files; None as `token` uses the one
    in its file. Raises as `site_dir`, or when a file cannot be read."""
    directory = site_dir()
    key = _kept(directory / "key", secrets.token_hex(KEY_BYTES))
    if not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ConflictError(
            f"{directory / 'key'} does not contain a key; remove it, then attach all jobs again"
        )
    if token is None:
        token = _kept(directory / "token", new_token())
    return Site(bytes.fromhex(key), token)


def read_token(path: str) -> str | None:
    """The token in the first line of a file; None when `path` is empty.

    Raises:
        UsageError: If it cannot be read or holds no valid token. The text never quotes it.
    """
    if not path:
        return None
    check_private(Path(path))
    try:
        with open(path, encoding="utf-8") as file:
            token = file.readline(MAX_FILE_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"token_file: {path} cannot be read: {error}") from None
    if len(token) < MIN_TOKEN_CHARS or not re.fullmatch(r"[!-~]+", token):
        raise UsageError(
            f"token_file: the first line of {path} is not {MIN_TOKEN_CHARS} or more ASCII "
            "characters without spaces; create one with: openssl rand -hex 32"
        )
    return token


def next_generation(directory: Path, *, now_s: float | None = None) -> int:
    """A number above those of all earlier control planes of this directory.

    It also follows the clock, so that of two control planes without a common directory the one that
    started later has the higher number.

    Raises:
        UsageError: When the directory cannot be written.
    """
    now_ms = int((now_s if now_s is not None else clock.now_s()) * 1000)
    path = directory / places.GENERATION_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            last = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0
            generation = max(last + GENERATION_STEP, now_ms)
            # Fixed width: no digits of the previous number can be left behind.
            os.pwrite(descriptor, f"{generation:018d}\n".encode(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}; set PARAMD_STATE_DIR") from error
    return generation


def _kept(path: Path, fresh: str) -> str:
    """The file's content; if there is no file, create it with `fresh`."""
    # O_EXCL: of two processes that start together only one creates it.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        check_private(path)
        return read_file(path, bounds.SMALL_FILE).decode().strip()
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}; set PARAMD_STATE_DIR") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(fresh + "\n")
        file.flush()
        os.fsync(file.fileno())
    return fresh
