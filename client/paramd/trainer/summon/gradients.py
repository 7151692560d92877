"""What this rank holds of each parameter's gradient, described as for parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paramd.errors import ConflictError
from paramd.layout.types import TensorKind
from paramd.trainer.model import dtensor, fsdp, plain
from paramd.trainer.model.dtensor import leaf_of
from paramd.trainer.model.flatten import wait_for_gradient
from paramd.trainer.model.local_shard import LocalShard, dtype_name
from paramd.trainer.summon.meeting import LocalParam
from paramd.trainer.summon.wrappers import FlatParameters, ShardedParameters


@dataclass(frozen=True, slots=True, eq=False)
class GradientHolding:
    """One gradient. No shards: this rank has no gradient, or no element of it."""

    shards: tuple[LocalShard, ...]
    expected: bool
    """Whether this rank holds elements of the parameter, so has the gradient if any rank does."""
    commit: Callable[[], None] | None = None
    """Copies the shards back to the gradient, where they are not views of it."""


def check_gradients(
    holdings: Iterable[LocalParam], flat: FlatParameters, sharded: ShardedParameters
) -> None:
    """Refuse gradients that are still unsharded.

    Raises:
        ConflictError: one is being accumulated by backwards without synchronization.
    """
    for holding in holdings:
        module, name = holding.places[0]
        place, fsdp_param = flat.place(module, name), sharded.find(module, name)
        accumulating = False
        if place is not None:
            parameter = place[0].flat_param
            grad = parameter.grad
            accumulating = grad is not None and grad.numel() != parameter._sharded_size.numel()
        elif fsdp_param is not None:
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            accumulating = fsdp_param.unsharded_accumulated_grad is not None or (
                unsharded is not None and unsharded.grad is not None
            )
        if accumulating:
            raise ConflictError(
                f"the gradient of {holding.names[0]!r} is being accumulated without "
                "synchronization, so it is unsharded and differs between ranks; summon with_grads "
                "after a backward that synchronizes"
            )


def find_gradient(
    holding: LocalParam, flat: FlatParameters, sharded: ShardedParameters
) -> GradientHolding:
    """The gradient of a parameter, as this rank holds it.

    Collective for DTensors whose gradient has other placements than the parameter.

    Raises:
        ConflictError: it is sparse or otherwise not a plain tensor.
    """
    expected = any(shard.region.numel for shard in holding.shards)
    module, name = holding.places[0]
    place = flat.place(module, name)
    if place is not None:
        handle, index = place
        return GradientHolding(tuple(_flat_shards(holding, handle, index)), expected)
    fsdp_param = sharded.find(module, name)
    slot = holding.shards[0].slot
    param = fsdp_param.sharded_param if fsdp_param is not None else slot.tensor()
    return _dense(holding, param, expected)


def _dense(holding: LocalParam, param: torch.Tensor, expected: bool) -> GradientHolding:
    param = leaf_of(param)
    grad = param.grad
    if grad is None:
        return GradientHolding((), expected)
    _, spec = dtensor.split(param)
    commit = None
    if dtensor.is_dtensor(grad):
        grad, commit = _placed_like(grad, param)
    else:
        grad = wait_for_gradient(grad).detach()
        if spec is not None:
            grad._st_info = spec  # type: ignore[attr-defined]
    shards = plain.shards_of(holding.names, grad, TensorKind.PARAMETER, holding.shards[0].slot)
    return GradientHolding(tuple(shards), expected, commit)


def _placed_like(grad: Any, param: Any) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The gradient under the parameter's placements, and how to write it back."""
    grad._local_tensor = wait_for_gradient(grad._local_tensor)
    if grad.placements == param.placements:
        return grad.detach(), None
    with torch.no_grad():
        placed = grad.redistribute(placements=param.placements)
        placed._local_tensor = wait_for_gradient(placed._local_tensor).clone()

    version = placed._local_tensor._version

    def commit() -> None:
        if _partial_only(grad, param) and placed._local_tensor._version == version:
            return
        with torch.no_grad():
            grad._local_tensor.copy_(_placed_back(placed, grad))

    return placed, commit


def _partial_only(grad: Any, param: Any) -> bool:
    """Whether writing it back needs no communication, so that a rank may skip it."""
    return all(
        one == other or one.is_partial()
        for one, other in zip(grad.placements, param.placements, strict=True)
    )


def _placed_back(placed: Any, grad: Any) -> torch.Tensor:
    """The local tensor of `placed` under the placements of `grad`."""
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in grad.placements]
    local = wait_for_gradient(placed.redistribute(placements=whole)._local_tensor)
    coordinate = grad.device_mesh.get_coordinate()
    for axis, placement in enumerate(grad.placements):
        # A sum goes wholly to the first rank, zeros elsewhere; an average is equal on all.
        if placement.is_partial("sum") and coordinate[axis] != 0:
            local = torch.zeros_like(local)
    return local


def _flat_shards(holding: LocalParam, handle: Any, index: int) -> Iterator[LocalShard]:
    local = _flat_gradient(handle, index)
    if local is None:
        return
    for region, view in fsdp.regions_of(handle.flat_param, index, local):
        yield replace(
            holding.shards[0], dtype=dtype_name(view.dtype), region=region, tensor=view, holders=()
        )


def _flat_gradient(handle: Any, index: int) -> torch.Tensor | None:
    """This rank's elements of the gradient, 1-D in the parameter's memory order."""
    flat = handle.flat_param
    info = flat._shard_param_infos[index]
    if not info.in_shard:
        return None
    if handle._use_orig_params:
        original: nn.Parameter = flat._params[index]
        if original.grad is None:
            return None
        return original.grad.detach().as_strided((info.numel_in_shard,), (1,))
    if flat.grad is None:
        return None
    begin: int = info.offset_in_shard
    whole: torch.Tensor = flat.grad.detach().view(-1)
    return whole[begin : begin + info.numel_in_shard]
