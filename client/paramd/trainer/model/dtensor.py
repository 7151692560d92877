"""DTensors: the boxes of the full tensor that this rank's local tensor holds.

Covers tensor parallelism, and parameters under `fully_shard` and `replicate`, on meshes of any
number of axes. Follows torch's own rule for each placement, but on runs of indices instead of
single offsets, since a `_StridedShard` may give a rank several runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from paramd.errors import ConflictError
from paramd.layout.types import Box, joined
from paramd.trainer.model.local_shard import of_class

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open intervals of global indices of one dim, in local memory order."""


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor; never imports the DTensor package."""
    return of_class(value, "torch.distributed.tensor._api", "DTensor")


def split(tensor: torch.Tensor) -> tuple[torch.Tensor, DTensorSpec | None]:
    """The local tensor and its spec; the tensor itself and None when not distributed.

    Handles DTensors, and the local parameters that torch's `_pre_dp_module_transform` makes of
    them for DDP, which carry the spec as `_st_info`.
    """
    if is_dtensor(tensor):
        distributed: Any = tensor
        return distributed._local_tensor, distributed._spec
    return tensor, getattr(tensor, "_st_info", None)


def like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` with the placement of `param`: a DTensor if that is one, else `local` itself."""
    if not is_dtensor(param):
        return local
    from torch.distributed.tensor import DTensor

    whole: Any = param
    return DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def leaf_of(param: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the gradient: torch's TP+DDP leaves a DTensor derived from it."""
    if param.is_leaf or param.grad_fn is None or not is_dtensor(param):
        return param
    (source, *_) = param.grad_fn.next_functions[0]
    leaf: torch.Tensor = getattr(source, "variable", param)
    return leaf


def describe(spec: DTensorSpec) -> str:
    """Placement in words, for example "Replicate over 2, Shard(0) over 2"."""
    words = []
    for axis, placement in enumerate(spec.placements):
        name = type(placement).__name__.lstrip("_")
        dim = "" if placement.is_replicate() else f"({getattr(placement, 'dim', '')})"
        words.append(f"{name}{dim} over {spec.mesh.size(axis)}")
    return ", ".join(words)


def local_boxes(fqn: str, spec: DTensorSpec, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of the full tensor that `local` holds, each with its view of `local`.

    One box except for rare placements; one empty box when the rank holds nothing.

    Raises:
        ConflictError: For a placement whose elements cannot be determined exactly.
    """
    shape = tuple(spec.shape)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return [(_empty_box(shape), local.reshape(-1)[:0])]
    _check(fqn, spec)
    runs = _runs_of_dims(spec, shape, coordinate)
    sizes = tuple(sum(e - b for b, e in dim_runs) for dim_runs in runs)
    if sizes != tuple(local.shape):
        raise ConflictError(
            f"parameter {fqn!r} is {describe(spec)} of shape {list(shape)}, so this rank should "
            f"hold {list(sizes)} but holds {list(local.shape)}; distribute it with "
            "torch.distributed.tensor.distribute_tensor"
        )
    if 0 in sizes:
        return [(_empty_box(shape), local.reshape(-1)[:0])]
    return list(_boxes(runs, local))


def _check(fqn: str, spec: DTensorSpec) -> None:
    for placement in spec.placements:
        if type(placement).__name__ not in ("Shard", "_StridedShard", "Replicate"):
            raise ConflictError(
                f"parameter {fqn!r} has placement {placement}; expected Shard or Replicate: "
                "redistribute it before paramd.attach"
            )
    order = getattr(spec, "shard_order", None) or ()
    for entry in order:
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            raise ConflictError(
                f"parameter {fqn!r} shards dim {entry.tensor_dim} over mesh axes "
                f"{list(entry.mesh_dims)} in this order; expected ascending axes"
            )


def _runs_of_dims(spec: DTensorSpec, shape: tuple[int, ...], coordinate: Any) -> tuple[Runs, ...]:
    runs: list[Runs] = [((0, size),) for size in shape]
    for axis, placement in enumerate(spec.placements):
        if placement.is_replicate():
            continue
        sharded: Any = placement
        parts = (spec.mesh.size(axis), coordinate[axis])
        factor = getattr(sharded, "split_factor", 1)
        runs[sharded.dim] = shard_runs(runs[sharded.dim], *parts, factor)
    return tuple(runs)


def shard_runs(runs: Runs, chunks: int, index: int, split_factor: int = 1) -> Runs:
    """The part of `runs` in chunk `index` of `chunks`, divided as by `torch.chunk`.

    With a split factor the runs are first divided into that many blocks, and the chunk gets its
    part of every block, as `_StridedShard` does. Source: torch's `_StridedShard._split_tensor`.
    """
    size = sum(end - begin for begin, end in runs)
    taken: list[tuple[int, int]] = []
    for block in range(split_factor):
        begin, end = _chunk(size, split_factor, block)
        inner_begin, inner_end = _chunk(end - begin, chunks, index)
        taken.extend(_positions(runs, begin + inner_begin, begin + inner_end))
    return tuple(joined(taken, 0))


def _chunk(size: int, chunks: int, index: int) -> tuple[int, int]:
    step = -(-size // chunks)
    return min(step * index, size), min(step * (index + 1), size)


def _positions(runs: Runs, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The global indices at positions [begin, end) of the runs laid end to end."""
    passed = 0
    for run_begin, run_end in runs:
        low = max(begin - passed, 0) + run_begin
        high = min(end - passed + run_begin, run_end)
        if low < high:
            yield low, high
        passed += run_end - run_begin


def _boxes(runs: tuple[Runs, ...], local: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    places = [accumulate((end - begin for begin, end in of), initial=0) for of in runs]
    # A dim has one place more than runs: the end of the last one.
    placed = [list(zip(of, at, strict=False)) for of, at in zip(runs, places, strict=True)]
    for corner in product(*placed):
        at = tuple(slice(place, place + end - begin) for (begin, end), place in corner)
        begins, ends = tuple(run[0] for run, _ in corner), tuple(run[1] for run, _ in corner)
        yield Box(begins, ends), local[at]


def _empty_box(shape: tuple[int, ...]) -> Box:
    corner = (0,) * len(shape)
    return Box(corner, corner)
