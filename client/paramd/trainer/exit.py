"""Work to finish before interpreter shutdown, when a training simply ends.

A gloo thread that drops the last reference to a collective's tensors takes the GIL, since each
tensor has a Python object. Once the interpreter finalizes, CPython ends any thread that asks for
the GIL with pthread_exit, inside a C++ destructor, and the process aborts: "terminate called
without an active exception", after everything has been computed and saved (seen with torch 2.13
and CPython 3.11). So no such thread may hold the last reference to one of our collectives.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import time
import weakref
from contextlib import suppress
from functools import cache
from typing import Protocol

LAST_ROUND_S = 1.0
"""How long an exiting process waits for the other ranks to reach its last boundary."""

SETTLE_S = 0.05
"""How long, in seconds, to yield the GIL to threads that still drop a collective's tensors."""


class Leaver(Protocol):
    """An object with work to do at interpreter exit."""

    def leave(self) -> None:
        """Run in the main thread before the interpreter finalizes; must be short."""


_owed: weakref.WeakValueDictionary[int, Leaver] = weakref.WeakValueDictionary()
_numbers = itertools.count()

# A forked child must not run them: the rounds and groups are its parent's to end.
os.register_at_fork(after_in_child=_owed.clear)


def register_at_exit(leaver: Leaver) -> None:
    """Call `leaver.leave` before the interpreter finalizes, last first; it is held weakly."""
    _leave_at_exit()
    _owed[next(_numbers)] = leaver


def keep_for_ever(thing: object) -> None:
    """Leak `thing`: its destructor never runs, not even when the interpreter finalizes."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@cache
def settle_at_exit() -> None:
    """Let gloo's threads drop their references before the interpreter finalizes.

    A collective of a large tensor completes for the caller some milliseconds before its thread
    releases the memory.
    """
    atexit.register(time.sleep, SETTLE_S)


@cache
def _leave_at_exit() -> None:
    # atexit runs last registered first: settle after leaving.
    settle_at_exit()
    atexit.register(_leave)


def _leave() -> None:
    for _, leaver in sorted(_owed.items(), reverse=True):
        # A failure here must not become the training's exit status.
        with suppress(Exception):
            leaver.leave()
