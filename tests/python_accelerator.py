"""An accelerator in Python, for a process of its own: torch's own seam for such, without kernels.

    python_accelerator.enter()
    tensor = python_accelerator.on_device(torch.ones(3))

It shows that code goes through `torch.accelerator` and not through CUDA. Its tensors can be made of
the host's and copied back; streams exist, and order nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "mine"


class Module:
    """In the place of `torch.cuda`."""

    initialized = False

    def __init__(self) -> None:
        self.states = [torch.arange(8, dtype=torch.uint8)]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_rng_state_all(self) -> list[torch.Tensor]:
        assert self.initialized, "a device that the training does not use was asked"
        return self.states

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = states


class Event:
    """In the place of `torch.Event`, as nobody can wait for such accelerators."""

    def __init__(self, device: torch.device, *, blocking: bool = False) -> None:
        self.recorded_on: torch.Stream | None = None

    def record(self, stream: torch.Stream) -> None:
        self.recorded_on = stream

    def synchronize(self) -> None:
        assert self.recorded_on is not None

    query = synchronize


class DeviceTensor(torch.Tensor):
    """On the device, as far as torch is told; its bytes are `held`."""

    held: torch.Tensor


def enter() -> Module:
    """For the rest of this process."""
    module = Module()
    torch.Event = Event  # type: ignore[assignment, misc]
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    library = torch.library.Library("aten", "IMPL")

    def copied(source: Any, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return target.copy_(source.held)

    library.impl("_copy_from", copied, "PrivateUse1")
    module.library = library  # type: ignore[attr-defined]
    return module


def on_device(tensor: torch.Tensor) -> DeviceTensor:
    found = torch._C._acc.create_empty_tensor(tensor.shape, tensor.dtype)
    found.__class__ = DeviceTensor
    found.held = tensor
    assert isinstance(found, DeviceTensor)
    return found
