"""Where training goes on in a rank that runs stages of a pipeline (torch.distributed.pipelining).

A later stage's forward begins when the earlier one has sent its output. A rank that waits at a
boundary in its forward would wait for ranks that wait for its output. So the boundary is where
the schedule begins a step, on all ranks before anything is sent: it then has each of its stages
clear what the last step left. Such a step counts as one backward, however many it has: some
ranks have more of them, by which the schedule learns the shapes of gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paramd.trainer.model.local_shard import loaded_class

if TYPE_CHECKING:
    from paramd.trainer.boundary.boundary import Boundary

STAGES = "torch.distributed.pipelining.stage"


def frames() -> Iterator[FrameType]:
    """The Python stack of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_stage(module: nn.Module) -> Any:
    """The stage whose forward of `module` runs on this thread now; None if none does."""
    stages: Any = loaded_class(STAGES, "_PipelineStageBase")
    if stages is None:
        return None
    for frame in frames():
        if frame.f_globals.get("__name__") == STAGES:
            stage = frame.f_locals.get("self")
            if isinstance(stage, stages) and any(m is module for m in stage.submod.modules()):
                return stage
    return None


def follow_stage(stage: Any, listener: Boundary) -> Callable[[], None]:
    """Tell `listener` of each training step that a schedule begins with this stage.

    Returns:
        What ends it.
    """
    clear = stage.clear_runtime_states

    def clear_runtime_states() -> None:
        clear()
        # A schedule's eval() has no backward.
        if stage.has_backward and torch.is_grad_enabled():
            listener.forward(trains=True)
            listener.backward()

    stage.clear_runtime_states = clear_runtime_states

    def end() -> None:
        if vars(stage).get("clear_runtime_states") is clear_runtime_states:
            del stage.clear_runtime_states

    return end
