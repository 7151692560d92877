"""Updates made within a backward: optimizers that step as soon as a gradient is there.

All steps within one backward make one update. It begins with the first of them and ends with the
backward, so nothing is read of it, not even at rest, while some parameters are new and others
old. If the backward raises, the update stays open until one succeeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import CodeType

import torch

from paramd.trainer.boundary.pipelines import frames
from paramd.trainer.boundary.signals import backward_id


class BackwardUpdate:
    """The owner of such updates at the boundary; knows which backward runs on which thread."""

    def __init__(self, end: Callable[[object, int], None]) -> None:
        """`end`: told of this owner and the thread when a backward that had steps is over."""
        self._end = end
        self._running: dict[int, tuple[int, int]] = {}
        """Outermost backwards by thread: id and depth of the stack."""
        self._stepping: set[int] = set()
        """Threads whose backward has had a step."""

    def started(self) -> None:
        """A backward runs on this thread; learns when it is over. Outside of one does nothing."""
        now = backward_id()
        if now == -1:
            return
        thread = threading.get_ident()
        known = self._running.get(thread)
        if known is not None and (known[0] == now or _depth() > known[1]):
            # Checkpointing runs backwards of its own within this one.
            return
        self._stepping.discard(thread)
        try:
            _at_the_end(partial(self._last, thread, now))
            self._running[thread] = now, _depth()
        except RuntimeError:
            # Compiled autograd may take no callbacks; then each step is an update of its own.
            self._running.pop(thread, None)

    def begins(self) -> bool:
        """Whether the step that begins is the first within the present backward."""
        if backward_id() == -1:
            return False
        self.started()
        thread = threading.get_ident()
        if thread in self._stepping or thread not in self._running:
            return False
        self._stepping.add(thread)
        return True

    def _last(self, thread: int, now: int) -> None:
        # FSDP reduces the root's gradients in a callback of its own, which may be after this.
        _at_the_end(partial(self._over, thread, now))

    def _over(self, thread: int, now: int) -> None:
        known = self._running.get(thread)
        if known is None or known[0] != now:
            return
        del self._running[thread]
        if thread in self._stepping:
            self._stepping.discard(thread)
            self._end(self, thread)


def _at_the_end(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _depth() -> int:
    """How many backwards the Python stack of this thread is in."""
    return sum(frame.f_code is _ENGINE for frame in frames())


_ENGINE: CodeType | None = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)
