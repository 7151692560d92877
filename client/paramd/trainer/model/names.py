"""Names as a user's `state_dict()` has them, whatever wraps the modules.

A wrapper's own step in the name (`module.`, `_fsdp_wrapped_module.`, `_orig_mod.`,
`_checkpoint_wrapped_module.`) is left out only where a wrapper of that type put it: a
user's attribute called "module" keeps its name.
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
"""Where each wrapper's class lives, its name, and the attribute that holds what it wraps."""


def loaded_class(module_name: str, class_name: str) -> type | None:
    """A class, if its module has been imported; else None, and nothing is an instance of it.

    So that looking at a model imports nothing that the model does not use: some of these
    modules take seconds to import.
    """
    found = getattr(sys.modules.get(module_name), class_name, None)
    return found if isinstance(found, type) else None


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules in tree order, each with the prefix of its names ("" or "blocks.0.").

    A module that is registered twice comes twice, as it does in a state dict.
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
