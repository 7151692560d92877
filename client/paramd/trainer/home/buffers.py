"""Copies of persistent buffers in an arena, refreshed on request.

Buffers change in forward, outside updates, and modules may rebind them to new tensors, so
every copy looks them up in the modules again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramd.errors import ConflictError
from paramd.layout.types import Region
from paramd.trainer.home.moving import Memory, bytes_at
from paramd.trainer.model import plain
from paramd.trainer.model.dtensor import split
from paramd.trainer.model.local_shard import LocalShard, dtype_name


class BufferCopies:
    """Row-major copies of buffer shards at fixed places in an arena."""

    def __init__(self, arena: Memory, placed: Sequence[tuple[LocalShard, int]]) -> None:
        """`placed`: each shard with its first byte in the arena."""
        self._shards = [shard for shard, _ in placed]
        self._targets = [_target(arena, shard, begin) for shard, begin in placed]

    def refresh(self) -> None:
        """Copy all buffers as they are now.

        Raises:
            ConflictError: a buffer's shape changed, or its dtype changed to one that does not fit.
        """
        pairs = zip(self._shards, self._targets, strict=True)
        sources = [_live(shard, target) for shard, target in pairs]
        with torch.no_grad():
            # One by one: `_foreach_copy_` takes no mixture of devices.
            for target, source in zip(self._targets, sources, strict=True):
                target.copy_(source)

    def restore(self) -> None:
        """Copy the arena's bytes into the model's buffers.

        Raises:
            ConflictError: as `refresh`.
        """
        pairs = list(zip(self._shards, self._targets, strict=True))
        lives = [_live(shard, target) for shard, target in pairs]
        with torch.no_grad():
            for live, target in zip(lives, self._targets, strict=True):
                live.copy_(target)


def _target(arena: Memory, shard: LocalShard, begin: int) -> torch.Tensor:
    size_bytes = shard.tensor.numel() * shard.tensor.itemsize
    span = bytes_at(arena, begin, size_bytes)
    return span.view(shard.tensor.dtype).view(shard.tensor.shape)


def _live(shard: LocalShard, target: torch.Tensor) -> torch.Tensor:
    value = shard.slot.owner.get(shard.slot.key)
    for region, source in _regions(shard, value):
        fits = torch.promote_types(source.dtype, target.dtype) == target.dtype
        if region == shard.region and source.shape == target.shape and fits:
            return source
    raise ConflictError(
        f"buffer {shard.fqn!r} was {shard.dtype} {list(shard.shape)} when attached and is "
        f"{_described(value)} now; detach and attach again to serve it"
    )


def _regions(shard: LocalShard, value: object) -> list[tuple[Region, torch.Tensor]]:
    if not isinstance(value, torch.Tensor):
        return []
    local, spec = split(value)
    if spec is None and local.shape == shard.shape and shard.region.numel == local.numel():
        return [(shard.region, local.detach())]
    found = plain.shards_of((shard.fqn,), value, shard.kind, shard.slot)
    return [(part.region, part.tensor) for part in found]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    return repr(value)
