"""The stages of a pipeline (torch.distributed.pipelining), and where a schedule begins its steps.

A later stage's forward begins when the earlier one has sent its output. A rank that waits at a
boundary in its forward would wait for ranks that wait for its output. So the boundary is where the
schedule begins a step, on all ranks before anything is sent: there it has each of its stages clear
the last step's state.

A step counts as one backward, whatever its number of stages on this rank, of microbatches, and of
attached modules in a stage. Backwards themselves are not counted: some ranks have extra ones, by
which the schedule learns the shapes of gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paramd.trainer.boundary.stack import frames
from paramd.trainer.model.local_shard import loaded_class

if TYPE_CHECKING:
    from paramd.trainer.boundary.boundary import Boundary

STAGES = "torch.distributed.pipelining.stage"


class Stages:
    """The stages that run roots of a model; tells the listener where their steps begin."""

    def __init__(self, listener: Boundary) -> None:
        self._listener = listener
        self._running: dict[int, weakref.ref[Any]] = {}
        """Stages by the id of the root that they run."""
        self._followed: weakref.WeakKeyDictionary[Any, weakref.ref[Callable[[], None]]] = (
            weakref.WeakKeyDictionary()
        )
        """What they call in place of their own method."""
        self._cleared: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that a step which has run none of them yet has cleared."""

    def runs(self, module: nn.Module) -> bool:
        """Whether a stage that lives is known to run this root."""
        stage = self._running.get(id(module))
        return stage is not None and stage() is not None

    def forward(self, module: nn.Module) -> bool:
        """Note that a forward of a root begins; return whether a stage was known to run it."""
        self._cleared.clear()
        known = self._running.get(id(module))
        was_known = known is not None and known() is not None
        stage = running_stage(module, known() if known is not None else None)
        # None also where a backward computes a stage's forward again, on a thread of its own.
        if stage is not None and (known is None or stage is not known()):
            # The first, or another one: a script may make a stage anew, and keep the old one.
            self._running[id(module)] = weakref.ref(stage)
            if stage not in self._followed:
                self._follow(stage)
        return was_known

    def close(self) -> None:
        """End following all stages. Idempotent."""
        for stage, ours in list(self._followed.items()):
            # Whoever has replaced ours in turn calls it: then it stays, and does nothing.
            if vars(stage).get("clear_runtime_states") is ours():
                del stage.clear_runtime_states
        self._followed.clear()
        self._running.clear()

    def _follow(self, stage: Any) -> None:
        clear = stage.clear_runtime_states

        def clear_runtime_states() -> None:
            clear()
            # A schedule's eval() has no backward.
            if stage in self._followed and stage.has_backward and torch.is_grad_enabled():
                self._begins(stage)

        # Held by the stage alone, whose cycle with it is for the garbage collector.
        stage.clear_runtime_states = clear_runtime_states
        self._followed[stage] = weakref.ref(clear_runtime_states)

    def _begins(self, stage: Any) -> None:
        """A schedule clears a stage, to begin a step that has a backward."""
        # It clears all of its stages before it runs one; a step that has run none may have failed.
        if stage in self._cleared:
            self._cleared.clear()
        first = not self._cleared
        self._cleared.add(stage)
        if first:
            self._listener.forward(trains=True)
            self._listener.backward()


def running_stage(module: nn.Module, known: Any) -> Any:
    """The stage whose forward of `module` runs on this thread now; None if none does.

    `known`: a stage that has run it before, whose modules are not searched again.
    """
    stages: Any = loaded_class(STAGES, "_PipelineStageBase")
    if stages is None:
        return None
    for frame in frames():
        if frame.f_globals.get("__name__") == STAGES:
            stage = frame.f_locals.get("self")
            if not isinstance(stage, stages):
                continue
            if stage is known or any(one is module for one in stage.submod.modules()):
                return stage
    return None
