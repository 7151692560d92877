"""The adapters' data types, and the module tree with names as in the user's own `state_dict()`.

A wrapper's prefix (`module.`, `_fsdp_wrapped_module.`, `_orig_mod.`,
`_checkpoint_wrapped_module.`) is dropped only where a wrapper of that type added it: a user's
attribute named "module" keeps its name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
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
    return _walk(model, "", _wrappers())


def _wrappers() -> list[tuple[type, str]]:
    return [
        (cls, inner)
        for module_name, class_name, inner in _WRAPPERS
        if (cls := loaded_class(module_name, class_name)) is not None
    ]


def as_written(model: nn.Module) -> Any:
    """A copy of the module tree with its authors' classes, by whose names other libraries find what
    they convert: `fully_shard` and `replicate` give a module a class of their own, and wrappers
    are left out. It shares all tensors, and has no hooks of a state dict.
    """
    return _as_written(model, _wrappers(), {})


def _as_written(module: Any, wrappers: list[tuple[type, str]], copies: dict[int, Any]) -> Any:
    inner = next((inner for cls, inner in wrappers if isinstance(module, cls)), None)
    if inner is not None:
        return _as_written(module._modules[inner], wrappers, copies)
    if id(module) in copies:
        return copies[id(module)]
    found: Any = object.__new__(authors_class(module))
    copies[id(module)] = found
    found.__dict__.update(module.__dict__, _modules={})
    # FSDP's would gather, or shard, the training's parameters.
    found.__dict__.update(_state_dict_hooks=OrderedDict(), _state_dict_pre_hooks=OrderedDict())
    for name, child in module._modules.items():
        found._modules[name] = child and _as_written(child, wrappers, copies)
    return found


def authors_class(module: nn.Module) -> type:
    """The module's class, without what torch's distributed wrappers made of it."""
    return next(cls for cls in type(module).__mro__ if not _is_torch_s(cls))


def _is_torch_s(cls: type) -> bool:
    return any(base.__module__.startswith("torch.distributed.") for base in cls.__mro__)


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
    part_of: tuple[torch.Tensor, ...] = ()
    """Those of them whose memory has this one's place in it, and into which whoever made them
    writes what the training's tensor gets elsewhere: FSDP1's flat parameter, of original ones."""
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
