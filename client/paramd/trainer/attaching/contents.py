"""Digests of unsharded parameters, by which ranks notice that theirs are different ones."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Sequence

import torch
from xxhash import xxh3_64_intdigest

from paramd.layout.types import TensorKind
from paramd.trainer.model.local_shard import LocalShard


def contents(shards: Sequence[LocalShard], names: Collection[str]) -> array[int]:
    """A digest of the values of each of these parameters, in the order of `shards`."""
    wanted = set(names)
    return array(
        "Q",
        (
            _digest(shard.tensor)
            for shard in shards
            if shard.kind is TensorKind.PARAMETER and shard.fqn in wanted
        ),
    )


def _digest(tensor: torch.Tensor) -> int:
    # Row-major: memory orders may differ between ranks.
    values = tensor.detach().to("cpu").contiguous()
    size_bytes = values.numel() * values.itemsize
    if not size_bytes:
        return 0
    return xxh3_64_intdigest((ctypes.c_char * size_bytes).from_address(values.data_ptr()))
