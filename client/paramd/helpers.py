"""Start and end the helper processes of a training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

FIRST_VICTIM = 1000
"""The highest `oom_score_adj`: the kernel ends such a process before any other of its limit."""

# glibc returns large blocks to the kernel and takes fresh pages for the next one; the first
# touch of a fresh page costs more than copying it (docs/decisions.md).
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


def spawn(
    module: str,
    arguments: list[str],
    *,
    log_path: Path,
    stdin: bytes | None = None,
    piped: bool = False,
    without: Collection[str] = ("PARAMD_TOKEN",),
) -> subprocess.Popen[bytes]:
    """Start `python -m module` in a new session, without these variables.

    The session shields it from a Ctrl-C in the trainer's terminal. stderr is appended to
    `log_path` (0600), and stdout unless it is `piped`. `stdin` carries secrets, which must not
    appear in argv or environment. The process is the kernel's first victim when memory runs out.
    """
    environment = os.environ | _MALLOC | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else log,
            stderr=log,
            env={name: text for name, text in environment.items() if name not in without},
            start_new_session=True,
        )
    finally:
        os.close(log)
    # Here too: an interpreter takes a moment to reach the helper's own call; a tracker has none.
    be_first_victim(process.pid)
    if process.stdin is not None and stdin is not None:
        with process.stdin:
            process.stdin.write(stdin)
    return process


def be_first_victim(pid: int | None = None) -> None:
    """Have the kernel end this helper (or `pid`) when memory runs out, never the training.

    A helper maps what its trainer uses, so it looks as large as the trainer to the kernel. Its
    children inherit the mark. Call it before core dumps are forbidden: afterwards only root may
    write it. Never fails; without /proc, or in a container that forbids it, nothing changes.
    """
    path = Path("/proc", str(pid) if pid is not None else "self", "oom_score_adj")
    # Raising it needs no privilege; lowering it does.
    with suppress(OSError):
        path.write_text(str(FIRST_VICTIM))


def end(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """Wait for a process to exit, then terminate it, then kill it, `grace_s` apart."""
    for stop in (process.terminate, process.kill):
        try:
            process.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            stop()
    process.wait()
