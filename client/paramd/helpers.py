"""Start and end the helper processes of a training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

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
    appear in argv or environment.
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
    if process.stdin is not None and stdin is not None:
        with process.stdin:
            process.stdin.write(stdin)
    return process


def end(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """Wait for a process to exit, then terminate it, then kill it, `grace_s` apart."""
    for stop in (process.terminate, process.kill):
        try:
            process.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            stop()
    process.wait()
