"""Whether a call waits for the very training that makes it.

A client may be used in the script that trains. What needs a boundary of that training then never
comes, if the training's own thread waits for it: such calls are refused at once. Trainers say here
which training runs in this process; clients ask.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from asyncio import events
from collections.abc import Callable, Collection
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from paramd.errors import ConflictError

P = ParamSpec("P")
Result = TypeVar("Result")

Who = tuple[int, "weakref.ref[asyncio.Task[object]] | None"]
"""A thread, and the task of asyncio that it was running; None: it was running none."""

_caller: ContextVar[int] = ContextVar("paramd_caller")
"""The thread that waits for what runs here, where that is another one."""


def who() -> Who:
    """Who calls. Takes a fraction of a microsecond, as it is asked in each forward."""
    loop = events._get_running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    return threading.get_ident(), weakref.ref(task) if task is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training of this process."""

    job: str
    incarnation: int
    rank: int
    socket_path: str
    host_id: str
    by: Callable[[], Collection[Who]]
    """Who trains: the callers of the last forward and of the last update."""

    def waits_for(self, caller: int | None) -> bool:
        """Whether this training goes on only when the call has ended. `caller`: the thread that
        waits for another one, which makes the call; None: who asks makes it."""
        if caller is not None:
            return any(thread == caller for thread, _ in self.by())
        thread, task = who()
        for trains_on, trains_in in self.by():
            # Beside a training that is a task itself, other tasks of its thread may wait.
            same = trains_in is None or (task is not None and trains_in() is task())
            if trains_on == thread and same:
                return True
        return False


_here: list[Training] = []
os.register_at_fork(after_in_child=_here.clear)


def begins(training: Training) -> None:
    """This process trains it from now on."""
    _here.append(training)


def ends(training: Training) -> None:
    """Undo `begins`. Idempotent."""
    if training in _here:
        _here.remove(training)


def for_caller(run: Callable[P, Result]) -> Callable[P, Result]:
    """`run`, for another thread to call while this one waits for it."""
    context = copy_context()
    context.run(_caller.set, threading.get_ident())

    def ran(*args: P.args, **kwargs: P.kwargs) -> Result:
        return context.run(run, *args, **kwargs)

    return ran


def waits_for_itself(
    job: str, incarnation: int, place_of: Callable[[int], tuple[str, str] | None]
) -> bool:
    """Whether the caller is what trains this job. `place_of` returns the `host_id` and
    `socket_path` of a rank's sidecar, None if it is not known: jobs elsewhere may have that name.
    """
    if not _here:
        return False
    caller = _caller.get(None)
    return any(
        (one.job, one.incarnation) == (job, incarnation)
        and place_of(one.rank) == (one.host_id, one.socket_path)
        and one.waits_for(caller)
        for one in _here
    )


ELSEWHERE: Final = "Call it from another thread or process while training runs"
"""What to do instead of waiting for oneself."""


def own_wait(what: str, instead: str) -> ConflictError:
    """The error of a call that would wait for its own caller."""
    return ConflictError(
        f"{what} needs a boundary of the training, which would never come: the thread that trains "
        f"makes this call and would wait for itself. {instead}"
    )
