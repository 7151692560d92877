"""Seconds since the Unix epoch for what has a life: a jump of the host's clock does not count.

Tickets and tokens say when they end in wall time, which hosts share. But the wall clock jumps:
set by hand, by a wrong time server, by a virtual machine that was stopped. So a process takes it
once and goes on by the clock that never jumps. It follows small corrections at once, and a new
time only when that has been the wall's for ten minutes: then it was no mistake.

A process that starts while the wall clock is wrong knows no better, and would hold the end of the
jump for one. So helpers leave their time in a file of their own for whoever is started in their
place on this host (`kept`).
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from paramd import state_files

SETTLE_S: Final = 600.0
"""A jump is believed when it has lasted for this long."""

FOLLOWED_S: Final = 1.0
"""Smaller differences are corrections, followed at once."""

KEPT_EVERY_S: Final = 120.0
"""Time between two writes of `kept`."""

_MAX_BYTES = 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # it counts sleep, too


class SteadyClock:
    """Call it for the time. For any thread."""

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = _since_boot_s,
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
        """Leaves in a file what `go_on_from` reads. Raises OSError."""
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
        """Takes over what a predecessor on this host, since its boot, left not long ago.

        False when there is none, or none that can be used: then the time is the wall's.
        """
        try:
            found = json.loads(_read_own(path))
            boot = str(found["boot"])
            names = ("looked_s", "offset_s", "other_s", "other_since_s")
            looked_s, offset_s, other_s, since_s = (float(found[name]) for name in names)
            here = _BOOT_ID.read_text().strip()
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return False
        with self._lock:
            # Later a new time may have settled, and nobody looked.
            usable = boot == here and 0 <= self._steady() - looked_s <= SETTLE_S
            if usable and all(map(math.isfinite, (offset_s, other_s, since_s))):
                self._offset_s, self._other_s, self._other_since_s = offset_s, other_s, since_s
                return True
        return False


def _read_own(path: Path) -> bytes:
    """A file that nobody else can have put there. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a file of ours")
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)


now_s: Final = SteadyClock()
"""The time of this process."""


@contextmanager
def kept(path: Path, clock: SteadyClock = now_s) -> Iterator[None]:
    """The clock goes on from this file, and within the block its time is left there."""
    clock.go_on_from(path)
    over = threading.Event()

    def keep() -> None:
        while True:
            with suppress(OSError):  # a full disk costs the successor this knowledge, nobody else
                clock.write(path)
            if over.wait(KEPT_EVERY_S):
                return

    thread = threading.Thread(target=keep, name="paramd-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)  # a state dir that hangs does not keep the helper from leaving
