"""Clients that summon as fast as it goes; every value must be the step that the answer carries."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paramd.errors import ParamdError
from tests.multiprocess.striking import Request, ask, stats_of_stamps, summon_stamps
from tests.multiprocess.truth import connect_to

REQUESTS: tuple[Request, ...] = (
    summon_stamps("grpc"),
    summon_stamps("same-host"),
    stats_of_stamps,
)


@dataclass
class Readings:
    """What all readers of an episode saw."""

    right: int = 0
    steps: set[int] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    longest_reason: str = ""
    failures: list[str] = field(default_factory=list)


class Readers:
    """One thread for each kind of request, from `start` to `stop`."""

    def __init__(self, state_dir: Path, job: str) -> None:
        self.readings = Readings()
        self._state_dir = state_dir
        self._job = job
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(request,)) for request in REQUESTS
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends all of them. Idempotent."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _read(self, request: Request) -> None:
        while not self._stop.is_set():
            try:
                with connect_to(self._state_dir, self._job) as mesh:
                    while not self._stop.is_set():
                        answer = ask(mesh, request)
                        self._note(answer.right, answer.step, answer.seconds, answer.reason)
            except ParamdError:
                time.sleep(0.1)  # no control plane at the moment
            except Exception as error:
                with self._lock:
                    self.readings.failures.append(f"{type(error).__name__}: {error}")
                return

    def _note(self, right: bool, step: int, seconds: float, reason: str) -> None:
        with self._lock:
            found = self.readings
            if right:
                found.right += 1
                found.steps.add(step)
            else:
                found.refused[reason.partition(":")[0]] += 1
            if seconds > found.longest_s:
                found.longest_s, found.longest_reason = seconds, reason
