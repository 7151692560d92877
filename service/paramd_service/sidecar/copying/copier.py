"""The one thread that copies, which sleeps until the trainer or a request wakes it."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from paramd.memory import descriptors
from paramd_service.sidecar.copying.capture import RETRY_NS, Capture, CopyJob
from paramd_service.sidecar.copying.page_requests import Boundary
from paramd_service.sidecar.log import Log


class Copier:
    """Runs a Capture on its own thread; every method may be called from any thread."""

    def __init__(self, capture: Capture, trainer_wake: int, log: Log) -> None:
        self.capture = capture
        self._trainer_wake = trainer_wake
        self.on_wake: Callable[[], None] = lambda: None
        """Called on the copying thread after each wake; must be quick."""
        self._log = log
        self._inbox: deque[Callable[[], None]] = deque()
        self._request_wake = descriptors.wake_event()
        self._stopping = False
        self._stopped = False
        self._posting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="paramd-copier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the copy in progress; pending work is given up."""
        # Before the post, whose wake may be the thread's last.
        self._stopping = True
        self._post(lambda: self.capture.give_up("the sidecar is stopping", jobs_too=True))
        self._thread.join()
        with self._posting:
            self._stopped = True
            os.close(self._request_wake)

    def submit(self, job: CopyJob) -> None:
        self._post(lambda: self.capture.submit(job))

    def cancel(self, job: CopyJob) -> None:
        self._post(lambda: self.capture.cancel(job))

    def arm(self, boundary: Boundary) -> None:
        self._post(lambda: self.capture.reaching.arm(boundary))

    def withdraw(self, number: int, reason: str) -> None:
        self._post(lambda: self.capture.reaching.withdraw(number, reason))

    def take_back(self, number: int, done: Callable[[], None]) -> None:
        """As `PageRequests.take_back`; then `done` is called on the copying thread."""

        def act() -> None:
            self.capture.reaching.take_back(number)
            done()

        self._post(act)

    def give_up(self, reason: str, *, jobs_too: bool) -> None:
        self._post(lambda: self.capture.give_up(reason, jobs_too=jobs_too))

    def _post(self, action: Callable[[], None]) -> None:
        with self._posting:
            # Once closed, the descriptor's number may be reused: drop late posts.
            if not self._stopped:
                self._inbox.append(action)
                descriptors.wake(self._request_wake)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._trainer_wake, self._request_wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            poll.poll(RETRY_NS // 1_000_000 if self.capture.waiting else None)
            # Drained before serving, so that a wake in between shows up in the next poll.
            for descriptor in (self._trainer_wake, self._request_wake):
                with suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
            try:
                self._serve_once()
                self.on_wake()
            except Exception as error:  # one failure must not end the thread
                self._log("copier-failed", error=repr(error))
            if self._stopping and not self._inbox:
                return

    def _serve_once(self) -> None:
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception as error:
                # The others' wake is spent, and the one that ends this thread may be among them.
                self._log("copier-failed", error=repr(error))
        self.capture.serve()
