"""What must be over before the interpreter is, when a training simply ends.

A thread of gloo that is the last to let go of a collective's tensors takes the GIL, as each
tensor has an object in Python. Once the interpreter finalizes, CPython ends a thread that asks
for the GIL with pthread_exit, inside a C++ destructor, and the process aborts: "terminate
called without an active exception", after everything has been computed and saved (seen with
torch 2.13 and CPython 3.11). So no thread may be the last to let go of a collective of ours.
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
"""How long an ending process waits for the other ranks to reach its last boundary."""

SETTLE_S = 0.05
"""How long threads that still drop tensors of a collective that has ended get the GIL."""


class Leaver(Protocol):
    """Something that owes a step to an interpreter that ends."""

    def leave(self) -> None:
        """Runs in the main thread before the interpreter finalizes; short."""


_owed: weakref.WeakValueDictionary[int, Leaver] = weakref.WeakValueDictionary()
_numbers = itertools.count()

# What a forked child has of them is its parent's to end.
os.register_at_fork(after_in_child=_owed.clear)


def owe(leaver: Leaver) -> None:
    """Has `leaver.leave` called before the interpreter finalizes, later ones first.

    What was dropped by then is not called.
    """
    _leave_at_exit()
    _owed[next(_numbers)] = leaver


def keep_for_ever(thing: object) -> None:
    """No destructor of it ever runs, not even when the interpreter finalizes."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@cache
def settle_at_exit() -> None:
    """Lets gloo's threads drop what they hold before the interpreter finalizes.

    A collective of a large tensor has ended for the caller some milliseconds before its
    thread has given the memory back.
    """
    atexit.register(time.sleep, SETTLE_S)


@cache
def _leave_at_exit() -> None:
    # The last registered runs first.
    settle_at_exit()
    atexit.register(_leave)


def _leave() -> None:
    for _, leaver in sorted(_owed.items(), reverse=True):
        # Whatever goes wrong here must not become the training's exit status.
        with suppress(Exception):
            leaver.leave()
