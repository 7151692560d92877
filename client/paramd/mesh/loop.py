"""The event loop thread that all synchronous meshes of a process share.

One for all: gRPC's asyncio side has one poller a process, and a loop of our own works
also where a loop already runs, as in a notebook.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """An event loop on a daemon thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="paramd-mesh", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine there and waits for it; an interrupt here cancels it there."""
        if self.is_current():
            work.close()
            raise RuntimeError("a synchronous mesh was called from its own loop; use paramd.aio")
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            # Also after its own error: cancelling what has ended does nothing.
            running.cancel()
            raise

    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Ends the thread. Whatever still runs there is cancelled."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


class _Shared:
    """Counts who uses the one loop thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._thread: LoopThread | None = None

    def acquire(self) -> LoopThread:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread()
            self._users += 1
            return self._thread

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._thread is not None:
                self._thread.stop()
                self._thread = None


_shared = _Shared()


def acquire() -> LoopThread:
    """The shared loop thread, started for its first user."""
    return _shared.acquire()


def release() -> None:
    """Gives it back; the last user ends it."""
    _shared.release()
