"""Names as in the user's own `state_dict()`, whatever wraps the modules.

A wrapper's prefix (`module.`, `_fsdp_wrapped_module.`, `_orig_mod.`,
`_checkpoint_wrapped_module.`) is dropped only where a wrapper of that type added it: a user's
attribute named "module" keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
"""Each wrapper class's module and name, and the attribute holding what it wraps."""


def loaded_class(module_name: str, class_name: str) -> type | None:
    """A class, if its module has been imported; else None, and nothing can be an instance.

    Avoids importing what the model does not use: some of these modules take seconds.
    """
    found = getattr(sys.modules.get(module_name), class_name, None)
    return found if isinstance(found, type) else None


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules in tree order, each with its name prefix ("" or "blocks.0.").

    A module registered twice appears twice, as in a state dict.
    """
    wrappers = [
        (cls, inner)
        for module_name, class_name, inner in _WRAPPERS
        if (cls := loaded_class(module_name, class_name)) is not None
    ]
    return _walk(model, "", wrappers)


def _walk(
    module: nn.Module, prefix: str, wrappers: list[tuple[type, str]]
) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    wrapped = next((inner for cls, inner in wrappers if isinstance(module, cls)), None)
    for name, child in module._modules.items():
        if child is not None:
            step = "" if name == wrapped else f"{name}."
            yield from _walk(child, prefix + step, wrappers)
