"""Keep one helper process of the trainer alive: watch, restart."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

log = logging.getLogger("paramd")

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
# A process that lived this long did not fail at startup.
STEADY_S = 5.0


class Supervisor:
    """A thread that waits for a process to exit and then calls `restart`.

    `restart` returns the new process's pidfd, or raises and is retried with growing delays.
    The thread sleeps in the kernel, so it costs the trainer nothing while the process lives.
    """

    def __init__(self, name: str, restart: Callable[[], int]) -> None:
        self._name = name
        self._restart = restart
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"paramd-{name}", daemon=True)
        self._pidfd: int | None = None
        self._closed = False

    def start(self, pidfd: int | None) -> None:
        """Start watching; None when the first start failed and should be retried."""
        self._pidfd = pidfd
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the process itself is left alone. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stop)
        if self._pidfd is not None:
            os.close(self._pidfd)

    def _run(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            if self._pidfd is not None:
                lived_long = not self._wait(self._pidfd, STEADY_S)
                if lived_long:
                    self._wait(self._pidfd, None)
                if self._stopped():
                    return
                os.close(self._pidfd)
                self._pidfd = None
                log.warning("paramd: the %s ended; starting it again", self._name)
                delay_s = FIRST_DELAY_S if lived_long else min(LONGEST_DELAY_S, 2 * delay_s)
            try:
                self._pidfd = self._restart()
            except Exception as error:
                log.warning(
                    "paramd: the %s did not start (%s); training continues without it, next try "
                    "in %.1f s", self._name, error, delay_s,
                )  # fmt: skip
                if self._wait(self._stop, delay_s):
                    return
                delay_s = min(LONGEST_DELAY_S, 2 * delay_s)

    def _wait(self, descriptor: int, timeout_s: float | None) -> bool:
        """Whether `descriptor` or the stop event became readable in time."""
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))

    def _stopped(self) -> bool:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        return bool(poller.poll(0))
