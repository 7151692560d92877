"""Moves a process's clock, and has it say another version, as a file tells it to.

PARAMD_SOAK_INJECT names a folder. `clock-<who>` there holds eight bytes, the seconds (float64)
by which the wall clock of that process is off, now and at every later look; `version-<who>` the
version that it says it is, when the process starts. `who` is control, sidecar-<rank> or
trainer-<rank>. Only time.time and time.time_ns are moved: monotonic clocks do not jump.
"""

import mmap
import os
import struct
import sys
import time
from pathlib import Path


def inject(who: str) -> None:
    """Takes what the folder has for `who`; nothing without a folder."""
    named = os.environ.get("PARAMD_SOAK_INJECT", "")
    if not named:
        return
    folder = Path(named)
    _move_clock(folder / f"clock-{who}")
    version = folder / f"version-{who}"
    if version.exists():
        import paramd.version

        paramd.version.__version__ = version.read_text()


def _move_clock(path: Path) -> None:
    if not path.exists():
        path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        page = mmap.mmap(file.fileno(), 8)
    real_s, real_ns = time.time, time.time_ns
    time.time = lambda: real_s() + struct.unpack("<d", page)[0]
    time.time_ns = lambda: real_ns() + int(1e9 * struct.unpack("<d", page)[0])


def _who() -> str:
    given = sys.orig_argv
    if "paramd_service.control" in given:
        return "control"
    if "paramd_service.sidecar" in given:
        return f"sidecar-{given[given.index('--rank') + 1]}"
    return ""


if __name__ == "sitecustomize" and _who():
    inject(_who())
