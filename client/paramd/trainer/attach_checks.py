"""What is looked at on each rank before anything is attached."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from paramd import places
from paramd.errors import ConflictError, UsageError
from paramd.trainer.attachment import attached


def check_attachable(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], job: str
) -> None:
    """Warns of trainable parameters that none of the optimizers updates.

    Raises:
        UsageError: the job's name is none, or an optimizer is not the model's.
        ConflictError: the model, or the job in this process, is attached already.
    """
    places.check_job_name(job)
    if id(model) in attached:
        raise ConflictError(f"this model is attached already ({attached[id(model)]!r}); detach it")
    if any(other.job == job for other in attached.values()):
        raise ConflictError(
            f"another model is attached as job {job!r} in this process; detach it, or attach "
            "this one under another job name"
        )
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    updated: set[int] = set()
    for index, optimizer in enumerate(optimizers):
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not mine & parameters.keys():
            raise UsageError(
                f"optimizer {index} ({type(optimizer).__name__}) updates no parameter of this "
                "model; make the optimizer after wrapping the model, and pass that model"
            )
        updated |= mine
    if optimizers and not all(id(p) in updated for p in model.parameters() if p.requires_grad):
        warnings.warn(
            "paramd.attach: some trainable parameters belong to none of the given optimizers; "
            "pass all optimizers, or change those parameters inside attachment.update()",
            stacklevel=2,
        )


def steps_done(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The number of updates that the optimizers themselves have counted, 0 if they do not."""
    return max(
        (
            int(state["step"])
            for optimizer in optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict) and "step" in state
        ),
        default=0,
    )
