"""What this rank holds of each tensor of a model, in the order of the module tree.

`find_shards` walks the tree once and asks, for each parameter, the adapter of whoever
manages it: fsdp1.py (flat parameters), fsdp2.py (`fully_shard`), else plain.py (plain
modules, DDP, tensor parallelism; all buffers). What a DTensor holds, dtensor.py knows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import nn

from paramd.layout.types import TensorKind
from paramd.trainer import fsdp1, fsdp2, plain
from paramd.trainer.local_shard import Entry, LocalShard, Slot
from paramd.trainer.names import walk

__all__ = ["LocalShard", "find_shards"]


def find_shards(model: nn.Module) -> list[LocalShard]:
    """All parameters and persistent buffers of `model`, in the order of its tree.

    Changes nothing and communicates nothing. Every rank names the same tensors, also those
    of which it holds no element.

    Raises:
        ConflictError: a tensor is of a kind whose elements cannot be told exactly.
    """
    tree = list(walk(model))
    modules = list({id(module): module for _, module in tree}.values())
    managed = fsdp1.managed(modules) | fsdp2.managed(modules)
    localized = plain.localized_for_ddp(modules)
    entries: dict[Hashable, Entry] = {}
    names: dict[Hashable, dict[str, None]] = {}
    for prefix, module in tree:
        own = dict(managed.get(id(module), {}))
        for name, entry in _entries_of(module, own, id(module) in localized):
            entries.setdefault(entry.key, entry)
            names.setdefault(entry.key, {})[prefix + name] = None
    return [s for key, entry in entries.items() for s in entry.shards(tuple(names[key]))]


def _entries_of(
    module: nn.Module, managed: dict[str, Entry], localized: bool
) -> Iterator[tuple[str, Entry]]:
    for name, param in module._parameters.items():
        if name in managed:
            yield name, managed.pop(name)
        elif param is not None and not getattr(param, "_is_flat_param", False):
            yield name, plain.entry(Slot(module._parameters, name), TensorKind.PARAMETER)
    yield from managed.items()
    for slot in plain.localized_slots(module) if localized else ():
        yield slot.key, plain.entry(slot, TensorKind.PARAMETER)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, plain.entry(Slot(module._buffers, name), TensorKind.BUFFER)
