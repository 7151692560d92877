"""Ends a soak that hangs: what it is at has a limit, whatever it waits for."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading

from tests import leaks

LIMIT_S = 420.0
"""One event with its recovery at the longest; every wait in it has a limit of its own."""


class Watchdog:
    """A thread that ends the process, and all that it started, with exit code 1.

    Use as a context manager; `expect` begins the time anew.
    """

    def __init__(self, again: str, limit_s: float = LIMIT_S) -> None:
        """`again`: how to repeat what is watched."""
        self._again, self._usual_s = again, limit_s
        self._what, self._limit_s = "the beginning", limit_s
        self._before = leaks.holdings()
        self._changed = threading.Condition()
        self._moves, self._over = 0, False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def expect(self, what: str, limit_s: float | None = None) -> None:
        """From now on this must be over within the limit, in seconds."""
        with self._changed:
            self._what = what
            self._limit_s = limit_s if limit_s is not None else self._usual_s
            self._moves += 1
            self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while not self._over:
                moves = self._moves
                moved = self._changed.wait_for(
                    lambda moves=moves: self._over or self._moves != moves, self._limit_s
                )
                if not moved:
                    self._end()

    def _end(self) -> None:
        print(
            f"FAILED: not over after {self._limit_s:.0f} s: {self._what}\n"
            f"repeat it with: {self._again}",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        leaks.end_new_processes(self._before)
        os._exit(1)
