"""No copy of a helper's memory on a disk: it holds tickets, a private key, parameters."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress

_PR_SET_DUMPABLE = 4


def forbid() -> None:
    """From now on this process dumps no core, and only root may trace it or read its /proc."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The limit does not hold for dumps that are piped to a program.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
