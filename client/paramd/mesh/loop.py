"""The event loop thread that all synchronous meshes of a process share.

One thread, because grpc.aio has one poller per process; our own loop, because the caller's
thread may already run one, as in a notebook.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from enum import Enum
from typing import Any, Final, Generic, Literal, TypeVar

from paramd import inside
from paramd.clock import seconds_of
from paramd.errors import UsageError

DEFAULT_TIMEOUT_S: Final = 60.0
_FOREVER_S: Final = 7 * 86_400.0
_ENDING_S: Final = 5.0
"""How long an interrupted call may take to end, in seconds."""

Result = TypeVar("Result")


class Unset(Enum):
    """Not given, as opposed to None."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
Timeout = float | str | None | Literal[Unset.UNSET]
"""Seconds, or a text such as "5s"; None means no limit, UNSET the mesh's default (60 s)."""


def allowed_s(timeout: Timeout, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Seconds that a call may take; UsageError unless the timeout is above 0."""
    if timeout is UNSET:
        return default_s
    seconds = seconds_of(timeout, "timeout") if timeout is not None else _FOREVER_S
    if seconds <= 0:
        raise UsageError(f"timeout: {seconds}; expected more than 0, or None for no limit")
    return seconds


def deadline(timeout: Timeout, default_s: float) -> float:
    """Deadline of a call, on the monotonic clock. Raises as `allowed_s`."""
    return time.monotonic() + allowed_s(timeout, default_s)


class LoopThread:
    """An event loop on a daemon thread, from construction to `stop`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="paramd-mesh", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the thread and wait for it.

        An interrupt cancels the coroutine and is raised once that has ended, so that cleanup finds
        nothing running.
        """
        if self.is_current():
            work.close()
            raise RuntimeError("a synchronous mesh was called from its own loop; use paramd.aio")
        return _Call(self._loop, work).result()

    @property
    def is_parents(self) -> bool:
        """Whether this process is a fork of the one that has the thread."""
        return self.pid != os.getpid()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Cancel all tasks and join the thread."""
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


class _Call(Generic[Result]):
    """A coroutine on a loop's thread, and another thread that waits for it."""

    def __init__(
        self, event_loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]
    ) -> None:
        self._loop = event_loop
        self._work = work
        # The task belongs to this thread, which waits for it.
        self._begin = inside.for_caller(event_loop.create_task)
        self._ended = threading.Event()
        self._task: asyncio.Task[Result] | None = None
        self._cancelled = False

    def result(self) -> Result:
        """Run it; what it returned or raised. An interrupt cancels it first."""
        try:
            # In here: after an interrupt right behind it, nobody would wait for the task.
            self._loop.call_soon_threadsafe(self._start)
            self._ended.wait()
        except BaseException:
            self._end()
            raise
        assert self._task is not None
        return self._task.result()

    def _start(self) -> None:
        self._task = self._begin(self._work)
        self._task.add_done_callback(self._note)

    def _note(self, task: asyncio.Task[Result]) -> None:
        # Retrieved here, or asyncio would report an interrupted call's exception as never
        # retrieved.
        if not task.cancelled():
            task.exception()
        self._ended.set()

    def _end(self) -> None:
        until_s = time.monotonic() + _ENDING_S
        while not self._ended.is_set() and (left_s := until_s - time.monotonic()) > 0:
            # One Ctrl-C often arrives as two signals; the second must not leave it running.
            with suppress(KeyboardInterrupt):
                self._loop.call_soon_threadsafe(self._cancel)
                self._ended.wait(left_s)

    def _cancel(self) -> None:
        # Once: a second time would cut its cleanup short.
        if self._cancelled:
            return
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()
        else:
            # The interrupt came before its start: calls are made in order.
            self._work.close()
            self._ended.set()


class _Shared:
    """The process's one loop thread and the number of its users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._thread: LoopThread | None = None

    def acquire(self) -> LoopThread:
        """The shared thread, started for its first user."""
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread()
            self._users += 1
            return self._thread

    def release(self) -> None:
        """Undo one `acquire`; the last user stops the thread."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._thread is not None:
                self._thread.stop()
                self._thread = None

    def forget(self) -> None:
        """In a forked child: the thread is the parent's, and so is the lock's holder."""
        self.__init__()  # type: ignore[misc]


shared: Final = _Shared()
os.register_at_fork(after_in_child=shared.forget)
