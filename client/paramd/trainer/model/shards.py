"""This rank's shards of each tensor of a model, in module tree order.

`find_shards` walks the tree once and asks the adapter of each parameter's manager: fsdp.py (both
kinds of FSDP), partitions.py (DeepSpeed, Megatron-Core), else plain.py (plain modules, DDP, tensor
parallelism; all buffers). dtensor.py determines the boxes of a DTensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from paramd.layout.types import TensorKind
from paramd.trainer.model import fsdp, partitions, plain
from paramd.trainer.model.local_shard import Entry, LocalShard, Slot, walk

__all__ = ["FoundTensor", "LocalShard", "find_shards", "find_tensors"]


@dataclass(slots=True, eq=False)
class FoundTensor:
    """A parameter or persistent buffer, with all its places in the module tree."""

    entry: Entry
    kind: TensorKind
    names: dict[str, None] = field(default_factory=dict)
    """Canonical name first, then the aliases."""
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Modules that have it, and its name in each, in tree order."""

    def shards(self) -> list[LocalShard]:
        """This rank's shards of the tensor, read now."""
        found = self.entry.shards(tuple(self.names))
        if self.kind is TensorKind.BUFFER:
            return found
        module, name = self.places[0]
        # A flat parameter cannot tell for each of the original ones behind it.
        registered = module._parameters.get(name)
        tensor = registered if registered is not None else found[0].slot.tensor()
        return [replace(shard, trainable=tensor.requires_grad) for shard in found]


def find_shards(model: nn.Module) -> list[LocalShard]:
    """All parameters and persistent buffers of `model`, in tree order.

    Changes nothing and does not communicate. Every rank names the same tensors, including those of
    which it holds no element.

    Raises:
        ConflictError: For a tensor of a kind whose elements cannot be determined exactly.
    """
    return [shard for tensor in find_tensors(model) for shard in tensor.shards()]


def find_tensors(model: nn.Module) -> list[FoundTensor]:
    """All parameters and persistent buffers, in tree order, tied ones once."""
    tree = list(walk(model))
    modules = list({id(module): module for _, module in tree}.values())
    managed = fsdp.managed(modules) | partitions.managed(model, modules)
    localized = plain.localized_for_ddp(modules)
    found: dict[Hashable, FoundTensor] = {}
    for prefix, module in tree:
        own = dict(managed.get(id(module), {}))
        for kind, name, entry in _entries_of(module, own, id(module) in localized):
            tensor = found.setdefault(entry.key, FoundTensor(entry, kind))
            tensor.names[prefix + name] = None
            tensor.places.append((module, name))
    return list(found.values())


def _entries_of(
    module: nn.Module, managed: dict[str, Entry], localized: bool
) -> Iterator[tuple[TensorKind, str, Entry]]:
    kind = TensorKind.PARAMETER
    for name, param in module._parameters.items():
        if name in managed:
            yield kind, name, managed.pop(name)
        elif param is not None and not getattr(param, "_is_flat_param", False):
            yield kind, name, plain.entry(Slot(module._parameters, name), kind)
    for name, entry in managed.items():
        yield kind, name, entry
    if localized:
        for slot in plain.localized_slots(module):
            yield kind, slot.key, plain.entry(slot, kind)
    kind = TensorKind.BUFFER
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield kind, name, plain.entry(Slot(module._buffers, name), kind)
