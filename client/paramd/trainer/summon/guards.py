"""Preconditions of a call: its arguments, and that this rank may summon now.

Refused in compiled code, in a forward or backward, and for places already summoned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from paramd.errors import ConflictError, UsageError
from paramd.trainer.model.tp_ddp import running_forwards

TIMEOUT_VARIABLE = "PARAMD_SUMMON_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The call's options; checked to be equal on all ranks."""

    recurse: bool
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


def timeout_from(timeout_s: float | None) -> float:
    """The longest wait for other ranks: the argument, else the environment, else 60 s.

    Raises:
        UsageError: not a number above 0.
    """
    name, value = "timeout_s", timeout_s
    if value is None:
        name, text = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE)
        if text is None:
            return DEFAULT_TIMEOUT_S
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{name} must be a number of seconds, is {text!r}") from None
    if not value > 0:
        raise UsageError(f"{name} must be above 0 seconds, is {value}")
    return value


summoned: dict[tuple[int, str], str] = {}
"""Names of the parameters summoned now, by place (module id, name in the module)."""


def check_not_compiling() -> None:
    """Refuse calls from code that torch.compile traces or runs.

    Raises:
        ConflictError: called from such code.
    """
    compiled = torch.compiler.is_compiling()
    if not compiled:
        # Untraced parts of a compiled function run as usual, but with this callback set.
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
        compiled = callback is not None and callback is not False
    if compiled:
        raise ConflictError(
            "summon_full_params was called in a region of torch.compile; call it outside, or "
            "from a function under torch.compiler.disable"
        )


def check_idle(module: nn.Module) -> None:
    """Refuse while a forward or a backward runs.

    Raises:
        ConflictError: this thread is in a backward, or in a forward of `module`, of a part of it
            or of a module containing it.
    """
    if torch._C._current_graph_task_id() != -1:
        raise ConflictError(
            "summon_full_params was called inside backward; call it between two steps"
        )
    inside = {id(inner) for inner in module.modules()}
    for running in running_forwards():
        if id(running) in inside or any(part is module for part in running.modules()):
            raise ConflictError(
                f"summon_full_params was called inside the forward of {type(running).__name__}; "
                "call it between two steps"
            )


def check_not_summoned(places: Iterable[tuple[nn.Module, str]]) -> None:
    """Refuse places that are already summoned.

    Raises:
        ConflictError: one is; the message names it.
    """
    for module, name in places:
        inside = summoned.get((id(module), name))
        if inside is not None:
            raise ConflictError(
                f"parameter {inside!r} is already summoned by a surrounding summon_full_params; "
                "leave that block first"
            )
