"""Seconds since the Unix epoch, for expiry times, unaffected by jumps of the host's clock.

Tickets and tokens expire in wall time, which hosts share. But the wall clock jumps: set by hand,
by a bad time server, by a virtual machine that was paused. So a process reads it once and then
continues on a clock that never jumps. It follows small corrections at once, and a new time only
after the wall clock has kept it for ten minutes, when it is assumed to be right.

A process started while the wall clock is wrong cannot know, and would take its correction for a
jump. So helpers leave their time in a file for later processes on this host (`kept`).
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from paramd import state_files
from paramd.answers import parsed_json
from paramd.bounds import SMALL_FILE
from paramd.errors import UsageError

_UNITS_S: Final = {"": 1, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{0,6})?)\s*([a-z]*)")


def seconds_of(given: float | str, what: str) -> float:
    """Seconds in a number, or in a text such as "90s", "500ms", "15m", "12h", "30d" or "4w".

    Raises UsageError, which names the argument by `what`, for anything else.
    """
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    found = _DURATION.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None or found[2] not in _UNITS_S:
        raise UsageError(
            f"{what}: {given!r}; expected seconds, or a number and ms, s, m, h, d or w, such as 12h"
        )
    return float(found[1]) * _UNITS_S[found[2]]


SETTLE_S: Final = 600.0
"""A jump is accepted once it has lasted this long."""

FOLLOWED_S: Final = 1.0
"""Smaller differences are corrections, followed at once."""

KEPT_EVERY_S: Final = 120.0
"""Time between writes by `kept`."""

_MAX_BYTES = 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def since_boot_s() -> float:
    """Seconds since boot: unlike CLOCK_MONOTONIC, also those in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Call it for the time. Thread-safe."""

    def __init__(
        self, *, wall: Callable[[], float] = time.time, steady: Callable[[], float] = since_boot_s
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._lock = threading.Lock()
        self._offset_s = wall() - steady()
        self._other_s = self._offset_s
        self._other_since_s = 0.0

    def __call__(self) -> float:
        """Seconds since the Unix epoch."""
        with self._lock:
            now_s = self._steady()
            offset_s = self._wall() - now_s
            if abs(offset_s - self._offset_s) <= FOLLOWED_S:
                self._offset_s = self._other_s = offset_s
            elif abs(offset_s - self._other_s) > FOLLOWED_S:
                self._other_s, self._other_since_s = offset_s, now_s
            elif now_s - self._other_since_s >= SETTLE_S:
                self._offset_s = offset_s
            return now_s + self._offset_s

    def write(self, path: Path) -> None:
        """Write the file that `go_on_from` reads. Raises OSError."""
        self()
        with self._lock:
            found = {
                "boot": _BOOT_ID.read_text().strip(),
                "looked_s": self._steady(),
                "offset_s": self._offset_s,
                "other_s": self._other_s,
                "other_since_s": self._other_since_s,
            }
        state_files.replace(path, json.dumps(found))

    def go_on_from(self, path: Path) -> bool:
        """Continue from the time another process left, recently and since this host's boot.

        Returns False if there is no usable file; then the time is the wall clock's.
        """
        try:
            with state_files.opened(path) as descriptor:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    raise PermissionError(f"{path} was not written by paramd; remove it")
                found = parsed_json(os.read(descriptor, _MAX_BYTES), SMALL_FILE)
            boot = str(found["boot"])
            names = ("looked_s", "offset_s", "other_s", "other_since_s")
            looked_s, offset_s, other_s, since_s = (float(found[name]) for name in names)
            here = _BOOT_ID.read_text().strip()
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return False
        with self._lock:
            # Not if older: a new time may have settled since without being noticed.
            usable = boot == here and 0 <= self._steady() - looked_s <= SETTLE_S
            if usable and all(map(math.isfinite, (offset_s, other_s, since_s))):
                self._offset_s, self._other_s, self._other_since_s = offset_s, other_s, since_s
                return True
        return False


now_s: Final = SteadyClock()
"""The time of this process."""


@contextmanager
def kept(path: Path, clock: SteadyClock = now_s) -> Iterator[None]:
    """Continue the clock from this file, and keep writing it there within the block."""
    clock.go_on_from(path)
    over = threading.Event()

    def keep() -> None:
        while True:
            with suppress(OSError):  # a full disk only costs the next process this hint
                clock.write(path)
            if over.wait(KEPT_EVERY_S):
                return

    thread = threading.Thread(target=keep, name="paramd-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)  # bounded: a hung state dir must not keep the helper from exiting
