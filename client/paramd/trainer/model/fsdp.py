"""FSDP, of both kinds: a rank's shards of the parameters that they manage.

FullyShardedDataParallel has many parameters in one flat one, cut across their borders. Of each
original parameter a rank holds an interval of the flattened elements, possibly empty; alignment
padding lies between them and belongs to none. With NO_SHARD it holds all of each. The precision is
the original one, which the optimizer keeps.

Under `fully_shard`, HSDP too, every parameter is a DTensor over padded local memory. The registered
parameter may be the unsharded one (after a forward without reshard), so the sharded one is taken
from FSDP's own record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paramd.errors import ConflictError
from paramd.layout.types import Box, Interval, Region, TensorKind, boxes_of_interval, row_major
from paramd.trainer.model import plain
from paramd.trainer.model.local_shard import (
    Entry,
    LocalShard,
    Managed,
    Names,
    Slot,
    dtype_name,
    of_class,
)

_FLAT = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_SHARDED = ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule")


def is_fsdp(module: nn.Module) -> bool:
    return of_class(module, *_FLAT) or of_class(module, *_SHARDED)


def managed(modules: Sequence[nn.Module]) -> Managed:
    """The parameters that either of them manages, tied ones included."""
    found: Managed = {}
    for state in flat_modules(modules):
        for module, name, index in flat_places(state._handle):
            found.setdefault(id(module), {})[name] = _flat_entry(state._handle, index)
    for fsdp_param in _fsdp_params(modules):
        for module, name in sharded_places(fsdp_param):
            found.setdefault(id(module), {})[name] = _sharded_entry(fsdp_param)
    return found


def flat_modules(modules: Iterable[nn.Module]) -> list[Any]:
    return [module for module in modules if of_class(module, *_FLAT)]


def flat_places(handle: Any | None) -> Iterator[tuple[nn.Module, str, int]]:
    """The registered places of a flat parameter's original ones, each with its index there.

    A handle of None, of a module that manages nothing itself, has none.
    """
    if handle is None:
        return
    indices: dict[tuple[int, str], int] = {}
    for index, info in enumerate(handle.flat_param._param_infos):
        indices[id(info.module), info.param_name] = index
        yield info.module, info.param_name, index
    for info in handle.flat_param._shared_param_infos:
        yield info.module, info.param_name, indices[id(info.prim_module), info.prim_param_name]


def sharded_states(modules: Iterable[nn.Module]) -> list[Any]:
    """The states of the modules among these that `fully_shard` made, each once."""
    sharded: list[Any] = [module for module in modules if of_class(module, *_SHARDED)]
    return list({id(state): state for state in (one._get_fsdp_state() for one in sharded)}.values())


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters of one of them."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        # Before torch 2.12 a state had at most one group.
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def sharded_places(fsdp_param: Any) -> Iterator[tuple[nn.Module, str]]:
    """The registered places of an FSDP parameter."""
    info = fsdp_param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def computes(modules: Iterable[nn.Module]) -> bool:
    """Whether FSDP is in a forward or backward of one of these modules.

    It works on gathered parameters then, which miss writes to shards.
    """
    modules = list(modules)
    handles = [state._handle for state in flat_modules(modules) if state._handle is not None]
    states = sharded_states(modules)
    holders = [*handles, *states, *(group for state in states for group in groups_of(state))]
    return any(holder._training_state.name != "IDLE" for holder in holders)


def gather_again(modules: Iterable[nn.Module]) -> None:
    """Gather again what forwards left unsharded, from the present shards.

    A forward without gradients leaves the root's parameters unsharded, and more where parameters
    are not resharded after a forward. The next forward would use those values, not what has been
    written to the shards since. Collective, if anything is unsharded; only while FSDP does not
    compute.
    """
    modules = list(modules)
    for state, handle in left_unsharded(flat_modules(modules)):
        gather_flat_again(state, handle)
    for state in sharded_states(modules):
        for group in groups_of(state):
            gather_group_again(group)


def left_unsharded(states: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The FSDP1 modules among these whose unsharded memory is allocated, with their handles."""
    for state in states:
        handle = state._handle
        # Nothing can be unsharded before the first forward.
        if handle is None or not hasattr(handle.flat_param, "_local_shard"):
            continue
        if handle.uses_sharded_strategy and not handle.needs_unshard():
            yield state, handle


def gather_flat_again(state: Any, handle: Any) -> None:
    """Gather the unsharded memory of one FSDP1 module again. Collective."""
    if handle._uses_param_mixed_precision or handle.flat_param.device != handle.device:
        # Its source is another shard, of low precision or on the device, which FSDP makes itself.
        reshard_flat(state, handle)
    else:
        # Into the same memory, since views of it may be registered or saved by autograd.
        handle._all_gather_flat_param(handle._get_padded_unsharded_flat_param())


def reshard_flat(state: Any, handle: Any) -> None:
    """Free the unsharded memory of one FSDP1 module, as FSDP itself does."""
    from torch.distributed.fsdp import _runtime_utils

    _runtime_utils._reshard(state, handle, True)


def gather_group_again(group: Any) -> None:
    """Gather the unsharded parameters of one group of `fully_shard` again. Collective."""
    # A gather that was begun ahead of its forward has the old values, too.
    group.wait_for_unshard()
    if group.is_sharded:
        return
    unsharded = group.is_unsharded
    group._to_sharded()
    if unsharded:
        group.unshard()
        group.wait_for_unshard()


def _fsdp_params(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for state in sharded_states(modules):
        for group in groups_of(state):
            yield from group.fsdp_params


def _flat_entry(handle: Any, index: int) -> Entry:
    return Entry((id(handle), index), lambda names: _shards(handle, index, names))


def _shards(handle: Any, index: int, names: Names) -> list[LocalShard]:
    flat = handle.flat_param
    fqn = names[0]
    if flat._param_extensions[index] is not None:
        raise ConflictError(
            f"parameter {fqn!r} is a DTensor inside FullyShardedDataParallel; "
            "shard tensor-parallel modules with torch.distributed.fsdp.fully_shard"
        )
    local = _local_shard(handle, fqn)
    plain.check_supported(fqn, local)
    original = _original(handle, index)
    shard = _shard_of(handle, index, local, original)
    holders = [flat, local, *(handle.flat_param._shared_params or ())]
    if original is None:
        slot = Slot(vars(handle), "flat_param")
    else:
        info = flat._param_infos[index]
        slot = Slot(info.module._parameters, info.param_name)
        holders.append(original)
    sharded = handle.uses_sharded_strategy
    return [
        LocalShard(
            fqn=fqn,
            aliases=names[1:],
            dtype=dtype_name(local.dtype),
            shape=tuple(flat._shapes[index]),
            kind=TensorKind.PARAMETER,
            placement=f"FlatShard over {handle.world_size}" if sharded else "replicated",
            region=region,
            tensor=view,
            slot=slot,
            holders=tuple(holders),
            # A flat parameter's own new memory is dropped by FSDP at the next forward's end.
            part_of=(flat, local) if original is not None else (),
        )
        for region, view in regions_of(flat, index, shard)
    ]


def _local_shard(handle: Any, fqn: str) -> torch.Tensor:
    """The padded local shard in original precision, 1-D."""
    flat = handle.flat_param
    local: torch.Tensor = getattr(flat, "_local_shard", flat.data)
    if local.shape != flat._sharded_size:
        raise ConflictError(
            f"parameter {fqn!r} is unsharded now; call paramd.attach between two steps and "
            "outside of summon_full_params"
        )
    return local


def _original(handle: Any, index: int) -> torch.Tensor | None:
    """The optimizer's own parameter, if it is not the flat one and is in place now."""
    flat = handle.flat_param
    info = flat._shard_param_infos[index]
    if not handle._use_orig_params or not info.in_shard or handle._skipped_use_sharded_views:
        return None
    param_info = flat._param_infos[index]
    param = param_info.module._parameters.get(param_info.param_name)
    matches = (
        isinstance(param, nn.Parameter)
        and param.numel() == info.numel_in_shard
        and param.dtype == flat.dtype
    )
    return param if matches else None


def _shard_of(
    handle: Any, index: int, local: torch.Tensor, original: torch.Tensor | None
) -> torch.Tensor:
    """The elements of one original parameter in this shard, 1-D, in its memory order."""
    info = handle.flat_param._shard_param_infos[index]
    if not info.in_shard:
        return local[:0]
    if original is not None:
        # FSDP itself treats a replaced original parameter as authoritative and writes it back.
        return original.detach().as_strided((info.numel_in_shard,), (1,))
    return local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]


def regions_of(flat: Any, index: int, shard: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
    """The regions this rank holds of one original parameter, with their views.

    `shard`: the elements here, 1-D in memory order, of the parameter or of its gradient.
    """
    info = flat._shard_param_infos[index]
    shape, strides = tuple(flat._shapes[index]), tuple(flat._strides[index])
    begin = info.intra_param_start_idx if info.in_shard else 0
    interval = Interval(begin, begin + shard.numel())
    if flat._contiguities[index] or shard.numel() == 0:
        return [(interval, shard)]
    return list(_permuted_boxes(interval, shape, strides, shard))


def _permuted_boxes(
    interval: Interval, shape: tuple[int, ...], strides: tuple[int, ...], shard: torch.Tensor
) -> Iterator[tuple[Region, torch.Tensor]]:
    """An interval, in memory order, of a parameter that is not row-major, as boxes."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(len(shape))]
    position = 0
    for box in boxes_of_interval(interval, [shape[dim] for dim in order]):
        run = shard[position : position + box.numel]
        position += box.numel
        view = run.as_strided(box.sizes, row_major(box.sizes), run.storage_offset())
        region = Box(tuple(box.begin[d] for d in back), tuple(box.end[d] for d in back))
        yield region, view.permute(back)


def _sharded_entry(fsdp_param: Any) -> Entry:
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
