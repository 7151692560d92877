"""Helpers leave no copy of their memory behind."""

from __future__ import annotations

import subprocess
import sys

PR_GET_DUMPABLE = 3
PROGRAM = f"""
import ctypes, resource
from paramd_service import core_dumps
core_dumps.forbid()
dumpable = ctypes.CDLL(None).prctl({PR_GET_DUMPABLE}, 0, 0, 0, 0)
print(dumpable, *resource.getrlimit(resource.RLIMIT_CORE))
"""


def test_a_helper_dumps_no_core() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "0", "0"]
