"""What the kernel tells about a trainer's process, without its help."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_LOG_LINES = 100
_TAIL_BYTES = 64 << 10
MAX_LINE_CHARS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """A process at one moment; -1 where the kernel does not tell."""

    state: str = ""
    """Letter of /proc/<pid>/stat."""
    rss_bytes: int = -1
    peak_rss_bytes: int = -1
    thread_count: int = -1
    open_files: int = -1
    open_files_limit: int = -1
    host_available_bytes: int = -1


def facts_of(pid: int) -> ProcessFacts:
    """Read /proc. Never fails: a process that has ended has no facts."""
    fields = _fields(Path(f"/proc/{pid}/status"))
    open_files = -1
    with suppress(OSError):
        open_files = len(os.listdir(f"/proc/{pid}/fd"))
    return ProcessFacts(
        state=fields.get("State", "")[:1],
        rss_bytes=_kib(fields.get("VmRSS")),
        peak_rss_bytes=_kib(fields.get("VmHWM")),
        thread_count=int(fields.get("Threads", "-1")),
        open_files=open_files,
        open_files_limit=_files_limit(pid),
        host_available_bytes=_kib(_fields(Path("/proc/meminfo")).get("MemAvailable")),
    )


def catches(pid: int, signal_number: int) -> bool:
    """Whether the process has a handler for the signal; without one it would be ended by it."""
    mask = _fields(Path(f"/proc/{pid}/status")).get("SigCgt", "0")
    return bool(int(mask, 16) >> (signal_number - 1) & 1)


def last_lines(pid: int, count: int) -> tuple[list[str], str]:
    """(last lines of the process's output, why there are none).

    Readable where stderr or stdout is a regular file, as with `torchrun --log-dir` or `2> log`.
    """
    for number in (2, 1):
        path = f"/proc/{pid}/fd/{number}"
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - _TAIL_BYTES, 0))
                text = file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            return [], f"its output cannot be read: {error.strerror}"
        if lines := text.splitlines()[-count:]:
            return [line[:MAX_LINE_CHARS] for line in lines], ""
    return [], (
        "its output goes to no file; start it with torchrun --log-dir DIR --redirects 3 to see it "
        "here"
    )


def _fields(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def _kib(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else -1


def _files_limit(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
            if line.startswith("Max open files"):
                return int(line.split()[3])
    return -1
