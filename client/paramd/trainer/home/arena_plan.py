"""Plan where the storages of a model's parameters lie in an arena. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from paramd.layout.types import TensorKind
from paramd.trainer.home import moving
from paramd.trainer.home.moving import Range, Ranges
from paramd.trainer.model.local_shard import LocalShard

ALIGN_BYTES = 64
"""torch's own alignment on the host. Kernels may dispatch on it, so every storage keeps its
address modulo this, and results stay bitwise equal."""


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


def plan_arena(
    shards: Sequence[LocalShard], tensors: Sequence[torch.Tensor], align_bytes: int = ALIGN_BYTES
) -> ArenaPlan:
    """Assign a span to every storage that the arena's `shards` use, and one to every buffer.

    `tensors` are all live ones, so that memory they share with parameters moves whole; every
    storage keeps its address modulo `align_bytes`. Addresses may come from any device: within a
    process they never overlap.
    """
    params = [s for s in shards if s.kind is TensorKind.PARAMETER and s.tensor.numel()]
    ranges = moving.close_over(
        Ranges(moving.storage_range(s.tensor) for s in params),
        [*tensors, *chain.from_iterable(s.holders for s in params)],
    )
    starts: dict[Range, int] = {}
    cursor = 0
    for home in dict.fromkeys(_home(ranges, s) for s in params):
        starts[home] = _aligned(cursor, align_bytes) + home.begin % align_bytes
        cursor = starts[home] + home.end - home.begin
    begins: list[int | None] = []
    for shard in shards:
        if shard.tensor.numel() == 0:
            begins.append(None)
        elif shard.kind is TensorKind.PARAMETER:
            home = _home(ranges, shard)
            begins.append(starts[home] + moving.address(shard.tensor) - home.begin)
        else:
            begins.append(_aligned(cursor, align_bytes))
            cursor = _aligned(cursor, align_bytes) + shard.tensor.numel() * shard.tensor.itemsize
    return ArenaPlan(
        arena_bytes=_aligned(cursor, align_bytes),
        ranges=tuple(starts),
        starts=tuple(starts.values()),
        begins=tuple(begins),
    )


def _home(ranges: Ranges, shard: LocalShard) -> Range:
    home = ranges.at(moving.address(shard.tensor))
    assert home is not None, "the ranges are those of the shards' storages"
    return home


def _aligned(offset: int, align_bytes: int) -> int:
    return -(-offset // align_bytes) * align_bytes
