"""Memory that the first steps of a training will take in host memory, before it shows anywhere.

Gradients appear with the first backward and optimizer state with the first update. Until then a
host looks emptier than it is, and what a reader or a standing snapshot took would be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paramd.trainer.model.dtensor import split

UNKNOWN_TENSORS = 2
"""State tensors per parameter that an unknown optimizer is taken to have, as AdamW does."""


def coming_bytes(
    parameters: Iterable[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> int:
    """Bytes of gradients of `parameters`, and of state of `optimizers`, that do not exist yet.

    Only of parameters in host memory; of a sharded one, this rank's shard counts.
    """
    expected = 0
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            expected += _host_bytes(parameter)
    for optimizer in optimizers:
        state = optimizer.state
        for group in optimizer.param_groups:
            count = tensors_of(optimizer, group)
            for parameter in group["params"]:
                if parameter.requires_grad and not (state.get(parameter)):
                    expected += count * _host_bytes(parameter)
    return expected


def tensors_of(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    """State tensors of a parameter's size that the optimizer makes for each parameter."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if "SGD" in names:
        return int(bool(group.get("momentum")))
    if "RMSprop" in names:
        return 1 + int(bool(group.get("momentum"))) + int(bool(group.get("centered")))
    if names & {"Adam", "AdamW", "NAdam", "RAdam"}:
        return 2 + int(bool(group.get("amsgrad")))
    if "LBFGS" in names:
        size = group.get("history_size")
        return 2 * size if isinstance(size, int) else UNKNOWN_TENSORS
    return next((count for name, count in _TENSORS.items() if name in names), UNKNOWN_TENSORS)


_TENSORS = {
    "Adagrad": 1, "Adadelta": 2, "Adamax": 2, "SparseAdam": 2, "ASGD": 1, "Rprop": 2,
    "Adafactor": 0, "Lion": 1,
}  # fmt: skip
"""By class name; Adafactor keeps a row and a column."""


def _host_bytes(tensor: torch.Tensor) -> int:
    local = split(tensor)[0]
    return local.numel() * local.itemsize if local.device.type == "cpu" else 0
