"""The adapters' data types: a local shard, its slot, and the entry it was found by."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from paramd.layout.types import Region, TensorKind

Names: TypeAlias = tuple[str, ...]
"""Canonical name first, then the aliases."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor is stored: a dict and its key, so that a replacement is noticed."""

    owner: dict[str, Any]
    key: str

    def tensor(self) -> torch.Tensor:
        """The tensor stored there now."""
        value = self.owner[self.key]
        assert isinstance(value, torch.Tensor)
        return value


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """One region of one tensor and the local memory holding it.

    A tensor has several of them on one rank only when its memory is not one dense box.
    """

    fqn: str
    """Canonical name, as in the user's state dict."""
    aliases: tuple[str, ...]
    """Other names of the same tensor."""
    dtype: str
    """torch dtype without its prefix."""
    shape: tuple[int, ...]
    """Global and unsharded."""
    kind: TensorKind
    placement: str
    region: Region
    """Unpadded; empty when the rank holds nothing."""
    tensor: torch.Tensor
    """Detached view of the local memory: shaped like the box, or 1-D for an interval."""
    slot: Slot
    """Where to find the tensor the training uses."""
    holders: tuple[torch.Tensor, ...] = ()
    """Local tensors known to use this memory; all move with it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor found in the tree: a key for its identity, and its adapter."""

    key: Hashable
    shards: Callable[[Names], list[LocalShard]]


Managed = dict[int, dict[str, Entry]]
"""Parameters managed by a wrapper, by their module's id and their name in it."""


def add_managed(managed: Managed, module: nn.Module, name: str, entry: Entry) -> None:
    """Record `module.name` as managed."""
    managed.setdefault(id(module), {})[name] = entry


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in layouts, for example "bfloat16"."""
    return str(dtype).removeprefix("torch.")
