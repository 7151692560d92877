"""The simulated CUDA driver and HIP runtime (standin.c), built with the compiler at hand.

No GPU and no CUDA is involved in what runs on it; the head of standin.c says what it has of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from paramd.memory.device_driver import CUDA, HIP, HIP_VARIABLE, VARIABLE, Driver, HipDriver
from tests.needs import program

SOURCE = Path(__file__).with_name("standin.c")
POISON = 0xDB
"""What a copy delivers that no event orders after an earlier write."""


@cache
def built() -> Path:
    """The library, made once for each version of its source. Skips the test without a compiler."""
    compiler = program("cc")
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"paramd-standin-{os.getuid()}-{name}.so"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}")
        warnings = ["-Wall", "-Wextra", "-Werror"]
        command = [compiler, "-shared", "-fPIC", "-O1", *warnings, "-o", str(made), str(SOURCE)]
        subprocess.run([*command, "-lpthread"], check=True, timeout=60)
        made.replace(target)
    return target


def environment(
    folder: Path, *, late_us: int = 0, kind: str = CUDA, **others: str
) -> dict[str, str]:
    """What processes need in their environment to share the simulated device of `folder`."""
    return {
        HIP_VARIABLE if kind == HIP else VARIABLE: str(built()),
        "PARAMD_STANDIN_DIR": str(folder),
        "PARAMD_STANDIN_LATE_US": str(late_us),
        **others,
    }


class Standin:
    """What only the simulated driver can be asked, in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(built()))
        self._library.paramd_standin_unordered.restype = ctypes.c_uint64

    def fail(self, calls: str) -> None:
        """Have calls fail from now on: "cuMemCreate=2,cuMemMap=801"; empty: none."""
        self._library.paramd_standin_fail(calls.encode())

    def capture(self, now: bool) -> None:
        """Have all streams say from now on that they are being captured, or not."""
        self._library.paramd_standin_capture(int(now))

    @property
    def unordered(self) -> int:
        """Copies of all processes so far that no event ordered."""
        return int(self._library.paramd_standin_unordered())

    @property
    def contexts(self) -> int:
        """Contexts made and not given back, also by processes that were killed."""
        return int(self._library.paramd_standin_contexts())

    @property
    def allocations(self) -> int:
        """Allocations of all processes so far; trying whether there can be any takes one."""
        return int(self._library.paramd_standin_allocations())

    @property
    def locked(self) -> int:
        """Pieces of host memory that are page-locked now, in all processes."""
        return int(self._library.paramd_standin_locked())

    def close(self) -> None:
        """Let go of the device, in this process."""
        self._library.paramd_standin_close()


@contextmanager
def driver_in(folder: Path, kind: str = CUDA) -> Iterator[tuple[Driver, Standin]]:
    """The simulated driver in this process, with a device of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STANDIN_DIR", str(folder))
        standin = Standin()
        try:
            yield (HipDriver if kind == HIP else Driver)(str(built())), standin
        finally:
            standin.close()
