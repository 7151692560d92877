"""Arena placement: pure arithmetic on the addresses of a model's storages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from paramd.errors import ConflictError
from paramd.layout.types import TensorKind
from paramd.trainer.home.storages import Range, Ranges, address, close_over, storage_range
from paramd.trainer.model.local_shard import LocalShard

ALIGN_BYTES = 64
"""torch's own alignment on the host. Kernels may dispatch on it, so every storage keeps its
address modulo this, and results stay bitwise equal."""


MIRRORED_DEVICES = ("cpu", "cuda")
"""Device types whose tensors can be copied into host memory."""


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Arena placement of the parameters' storages, followed by the buffers."""

    arena_bytes: int
    ranges: tuple[Range, ...]
    """Private memory to move, in module tree order."""
    starts: tuple[int, ...]
    """First arena byte of each range."""
    begins: tuple[int | None, ...]
    """First arena byte of each shard; None for one without elements."""


def arena_kind(tensor: torch.Tensor) -> str:
    """The kind of arena that can hold the tensor; so far only "host".

    Raises:
        ConflictError: there is no arena for its device.
    """
    if tensor.device.type != "cpu":
        raise ConflictError(
            f"parameters on {tensor.device}: only those in host memory can be moved into an arena"
        )
    return "host"


def check_reachable(shard: LocalShard) -> None:
    """Refuse a tensor that cannot be copied into host memory.

    Raises:
        ConflictError: naming the tensor.
    """
    if shard.tensor.device.type not in MIRRORED_DEVICES:
        raise ConflictError(
            f"tensor {shard.fqn!r} is on {shard.tensor.device}; expected one of "
            f"{', '.join(MIRRORED_DEVICES)}"
        )


def plan_arena(shards: Sequence[LocalShard], tensors: Sequence[torch.Tensor]) -> ArenaPlan:
    """Assign a span to every storage a parameter uses, and one to every buffer.

    Args:
        shards: what the arena is for.
        tensors: all live tensors, so that memory they share with parameters moves whole.

    Addresses may come from any device: within a process they never overlap.
    """
    params = [s for s in shards if s.kind is TensorKind.PARAMETER and s.tensor.numel()]
    ranges = close_over(
        Ranges(storage_range(s.tensor) for s in params),
        [*tensors, *chain.from_iterable(s.holders for s in params)],
    )
    starts: dict[Range, int] = {}
    cursor = 0
    for home in dict.fromkeys(_home(ranges, s) for s in params):
        starts[home] = _aligned(cursor) + home.begin % ALIGN_BYTES
        cursor = starts[home] + home.end - home.begin
    begins: list[int | None] = []
    for shard in shards:
        if shard.tensor.numel() == 0:
            begins.append(None)
        elif shard.kind is TensorKind.PARAMETER:
            home = _home(ranges, shard)
            begins.append(starts[home] + address(shard.tensor) - home.begin)
        else:
            begins.append(_aligned(cursor))
            cursor = _aligned(cursor) + shard.tensor.numel() * shard.tensor.itemsize
    return ArenaPlan(
        arena_bytes=_aligned(cursor),
        ranges=tuple(starts),
        starts=tuple(starts.values()),
        begins=tuple(begins),
    )


def _home(ranges: Ranges, shard: LocalShard) -> Range:
    home = ranges.at(address(shard.tensor))
    assert home is not None, "the ranges are those of the shards' storages"
    return home


def check_movable(shard: LocalShard) -> None:
    """Refuse a tensor that has no kind of arena, or that other processes use.

    Raises:
        ConflictError: naming the tensor.
    """
    try:
        arena_kind(shard.tensor)
    except ConflictError as error:
        raise ConflictError(f"tensor {shard.fqn!r}: {error}") from None
    if shard.kind is TensorKind.PARAMETER and shard.tensor.is_shared():
        raise ConflictError(
            f"parameter {shard.fqn!r} is in memory shared with other processes "
            "(share_memory), which would stop seeing its updates; attach before sharing it "
            "or do not share it"
        )


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES
