"""`fully_shard` and HSDP: every parameter is a DTensor over padded local memory.

The registered parameter may be the unsharded one (after a forward without reshard), so the
sharded one is taken from FSDP's own record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from paramd.layout.types import TensorKind
from paramd.trainer.model import plain
from paramd.trainer.model.local_shard import Entry, Managed, Slot, add_managed, loaded_class


def managed(modules: Iterable[nn.Module]) -> Managed:
    """The parameters that `fully_shard` manages."""
    found: Managed = {}
    for fsdp_param in _fsdp_params(modules):
        entry = _entry(fsdp_param)
        info = fsdp_param._module_info
        add_managed(found, info.module, info.param_name, entry)
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            add_managed(found, module, name, entry)
    return found


def has_gathered(modules: Iterable[nn.Module]) -> bool:
    """Whether any parameter is unsharded now."""
    return any(p.sharded_state.name != "SHARDED" for p in _fsdp_params(modules))


def _fsdp_params(modules: Iterable[nn.Module]) -> Iterator[Any]:
    cls = loaded_class("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule")
    states: dict[int, Any] = {}
    for module in modules:
        if cls is not None and isinstance(module, cls):
            fsdp_module: Any = module
            state = fsdp_module._get_fsdp_state()
            states[id(state)] = state
    for state in states.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            # Before torch 2.12 a state had at most one group.
            groups = [g for g in (state._fsdp_param_group,) if g is not None]
        for group in groups:
            yield from group.fsdp_params


def _entry(fsdp_param: Any) -> Entry:
    slot = Slot(vars(fsdp_param), "sharded_param")
    return Entry(
        id(fsdp_param),
        lambda names: plain.shards_of(
            names,
            slot.tensor(),
            TensorKind.PARAMETER,
            slot,
            holders=(fsdp_param._sharded_param_data,),
        ),
    )
