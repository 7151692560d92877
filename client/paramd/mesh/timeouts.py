"""How callers bound the time of a call."""

from __future__ import annotations

import time
from enum import Enum
from typing import Final, Literal

from paramd.errors import UsageError

DEFAULT_TIMEOUT_S: Final = 60.0
_FOREVER_S: Final = 7 * 86_400.0


class Unset(Enum):
    """Not given, which differs from None."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
Timeout = float | None | Literal[Unset.UNSET]
"""Seconds; None waits for as long as it takes; UNSET is the mesh's own default."""


def deadline(timeout: Timeout, default_s: float) -> float:
    """When a call has to end, on the monotonic clock.

    Raises:
        UsageError: the timeout is not above 0.
    """
    seconds = default_s if timeout is UNSET else timeout
    if seconds is not None and seconds <= 0:
        raise UsageError(f"timeout: {seconds}; expected more than 0, or None for no limit")
    return time.monotonic() + (seconds if seconds is not None else _FOREVER_S)
