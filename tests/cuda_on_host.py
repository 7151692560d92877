"""Lets a package run on the host that allocates on the current CUDA device and nowhere else.

    cuda_on_host.enter()  # first of all, in a process of its own

What Megatron-Core 0.16 asks of CUDA in its buffers and optimizers is a device to allocate on, under
its index or its name, and that `Tensor.type()` tells of it. Here the host's memory is what it gets,
and `torch.cuda.FloatTensor` what it hears. Nothing of the package is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


class _OnHost(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if options.get("device") == "cuda":
            options["device"] = HOST
        found = func(*args, **options)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


def enter() -> None:
    """For the rest of this thread, and of the process."""
    torch.cuda.current_device = lambda: HOST  # type: ignore[assignment, return-value]
    torch.cuda.set_device = lambda _: None  # type: ignore[assignment]
    _OnHost().__enter__()  # type: ignore[no-untyped-call]
