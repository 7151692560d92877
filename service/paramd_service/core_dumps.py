"""Keep a helper's memory off the disk: it has tickets, a private key, parameters."""

import ctypes
import resource
from contextlib import suppress

_PR_SET_DUMPABLE = 4


def forbid() -> None:
    """Disable core dumps; from now on only root may trace this process or read its /proc."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The limit does not apply to dumps that are piped to a program.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
