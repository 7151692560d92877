"""What the kernel reports about a trainer's process, without the process's help."""

from __future__ import annotations

import os
import resource
import stat
import threading
from contextlib import suppress
from pathlib import Path

from paramd import state_files
from paramd.v1 import sidecar_pb2 as pb

MAX_LOG_LINES = 100
MAX_LINE_CHARS = 500


def facts_of(pid: int) -> pb.InspectTrainerResponse:
    """What /proc reports about a process, -1 where unknown. Never fails, even once it has ended."""
    fields = _fields(Path(f"/proc/{pid}/status"))
    open_files = limit = -1
    with suppress(OSError):
        open_files = len(os.listdir(f"/proc/{pid}/fd"))
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    return pb.InspectTrainerResponse(
        process_state=fields.get("State", "")[:1],
        rss_bytes=_kib(fields.get("VmRSS")),
        peak_rss_bytes=_kib(fields.get("VmHWM")),
        thread_count=int(fields.get("Threads", "-1")),
        open_file_count=open_files,
        open_file_limit=limit,
        host_available_bytes=_kib(_fields(Path("/proc/meminfo")).get("MemAvailable")),
    )


def catches(pid: int, signal_number: int) -> bool:
    """Whether the process has a handler for the signal, which would otherwise end it."""
    mask = _fields(Path(f"/proc/{pid}/status")).get("SigCgt", "0")
    return bool(int(mask, 16) >> (signal_number - 1) & 1)


NO_FILE = (
    "its output goes to no file; start it with torchrun --log-dir DIR --redirects 3 to see it here"
)

ELSEWHERE = "it runs in another container, whose log has its output"


def last_lines(pid: int, count: int) -> tuple[list[str], str]:
    """(last lines of the process's output, why there are none).

    Readable only where stderr or stdout is a regular file, as with `torchrun --log-dir`.
    """
    output = TrainerOutput()
    try:
        output.open(pid)
        tails = output.tails(count)
    finally:
        output.close()
    lines = next((lines for _, lines, _ in tails if lines), [])
    return [line[:MAX_LINE_CHARS] for line in lines], "" if lines else tails[0][2]


Tail = tuple[str, list[str], str]
"""Source, last lines, and why there are none."""


class TrainerOutput:
    """The files that a trainer's stderr and stdout go to, kept open to show why it died.

    Methods block on the disk: call them in threads. Thread-safe.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._why = NO_FILE
        self._closed = False
        self._lock = threading.Lock()

    def open(self, pid: int) -> None:
        """Open what the process writes to now (0: it runs in another container). Never fails."""
        if not pid:
            self._why = ELSEWHERE
            return
        files: dict[str, int] = {}
        seen = set()
        for source, number in (("stderr", 2), ("stdout", 1)):
            path = f"/proc/{pid}/fd/{number}"
            try:
                found = os.stat(path)
                # A terminal or a pipe has no history, and opening some of them would block.
                if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) in seen:
                    continue
                files[source] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                seen.add((found.st_dev, found.st_ino))
            except OSError as error:
                self._why = f"its output cannot be read: {error.strerror}"
        with self._lock:
            self._files, files = (files, {}) if not self._closed else ({}, files)
        for descriptor in files.values():
            os.close(descriptor)

    def tails(self, count: int) -> list[Tail]:
        """The end of each file, stderr first; one entry without lines when there is none."""
        with self._lock:
            files = {source: os.dup(descriptor) for source, descriptor in self._files.items()}
        try:
            found = [tail_of(source, descriptor, count) for source, descriptor in files.items()]
        finally:
            for descriptor in files.values():
                os.close(descriptor)
        return found or [("trainer", [], self._why)]

    def close(self) -> None:
        """Idempotent, and final."""
        with self._lock:
            self._closed = True
            files, self._files = self._files, {}
        for descriptor in files.values():
            os.close(descriptor)


def own_tail(count: int) -> Tail:
    """The end of what this process, the sidecar, has logged; never fails."""
    path = "/proc/self/fd/2"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "sidecar", [], "its log goes to no file"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return "sidecar", [], f"its log cannot be read: {error.strerror}"
    try:
        return tail_of("sidecar", descriptor, count)
    finally:
        os.close(descriptor)


def tail_of(source: str, descriptor: int, count: int) -> Tail:
    """The end of an open regular file; never fails."""
    try:
        lines = state_files.last_lines(descriptor, count)
    except OSError as error:
        return source, [], f"it cannot be read: {error.strerror}"
    return source, lines, "" if lines else "nothing has been written to it"


def _fields(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def _kib(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else -1
