"""The accelerator that torch was built for, and whether the training uses it; never initializes it.

Querying a device the wrong way initializes it, which takes memory there and makes a fork
impossible. `in_use` returns torch's module of the accelerator only after the training has done so.
"""

from __future__ import annotations

from typing import Any

import torch


def kind() -> str | None:
    """The device type of the accelerator that this torch was built for, such as "cuda"."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else None


def in_use() -> Any | None:
    """torch's module of the accelerator, such as `torch.cuda`; None before the training uses it."""
    found = kind()
    if found is None:
        return None
    module = torch.get_device_module(found)
    is_initialized = getattr(module, "is_initialized", None)
    # A module that cannot report whether it is initialized is left alone.
    return module if is_initialized is not None and is_initialized() else None


def holds(tensor: torch.Tensor) -> bool:
    return tensor.device.type == kind()


def captures(device: torch.device) -> bool:
    """Whether what is queued on the device now is recorded into a graph, instead of done."""
    stream = torch.accelerator.current_stream(device)
    # Older versions of torch report CUDA graphs alone.
    asked = getattr(stream, "is_capturing", torch.cuda.is_current_stream_capturing)
    return bool(asked())
