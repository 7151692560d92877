"""The adapters' data types, and the module tree with names as in the user's own `state_dict()`.

A wrapper's prefix (`module.`, `_fsdp_wrapped_module.`, `_orig_mod.`,
`_checkpoint_wrapped_module.`) is dropped only where a wrapper of that type added it: a user's
attribute named "module" keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from paramd.layout.types import Region, TensorKind

_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel", "module"),
    ("megatron.core.transformer.module", "Float16Module", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
"""Each wrapper class's module and name, and the attribute holding what it wraps."""


def loaded_class(module_name: str, class_name: str) -> type | None:
    """A class if its module has been imported; else None, and nothing can be an instance.

    Avoids importing what the model does not use: some of these modules take seconds.
    """
    found = getattr(sys.modules.get(module_name), class_name, None)
    return found if isinstance(found, type) else None


def of_class(value: object, module_name: str, class_name: str) -> bool:
    """Whether it is an instance of that class, by `loaded_class`."""
    cls = loaded_class(module_name, class_name)
    return cls is not None and isinstance(value, cls)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules in tree order with name prefixes, repeated as in a state dict."""
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
            yield from _walk(child, prefix + ("" if name == wrapped else f"{name}."), wrappers)


Names: TypeAlias = tuple[str, ...]
"""Canonical name first, then the aliases."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The dict and key that store a tensor, so that a replacement is noticed."""

    owner: dict[str, Any]
    key: str

    def tensor(self) -> torch.Tensor:
        value = self.owner[self.key]
        assert isinstance(value, torch.Tensor)
        return value


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """One region of one tensor and the local memory holding it.

    A tensor has several of them on one rank only when its memory is not one dense box.
    """

    fqn: str
    """Canonical name, as in the user's state dict."""
    aliases: tuple[str, ...]
    dtype: str
    """torch dtype without its prefix."""
    shape: tuple[int, ...]
    """Global and unsharded."""
    kind: TensorKind
    placement: str
    region: Region
    """Unpadded; empty when the rank holds nothing."""
    tensor: torch.Tensor
    """Detached view of the local memory: shaped like the box, or 1-D for an interval."""
    slot: Slot
    """The place of the tensor that the training uses."""
    holders: tuple[torch.Tensor, ...] = ()
    """Local tensors known to use this memory; all move with it."""
    trainable: bool | None = None
    """Whether it requires a gradient, when this was read; None for buffers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor found in the tree: a key for its identity, and its adapter."""

    key: Hashable
    shards: Callable[[Names], list[LocalShard]]


Managed = dict[int, dict[str, Entry]]
"""Parameters managed by a wrapper, by their module's id and their name in it."""


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in layouts, for example "bfloat16"."""
    return str(dtype).removeprefix("torch.")
