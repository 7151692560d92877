"""The words of the adapters: a local shard, where it stands, and how it was found."""

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
    """Where a tensor stands: a dict and its key, so that replacing it is noticed."""

    owner: dict[str, Any]
    key: str

    def tensor(self) -> torch.Tensor:
        """The tensor that stands there now."""
        value = self.owner[self.key]
        assert isinstance(value, torch.Tensor)
        return value


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """One region of one tensor and the local memory that holds it.

    A tensor has several of them on one rank only when its memory is no single dense box.
    """

    fqn: str
    """Canonical name, as a user's state dict has it."""
    aliases: tuple[str, ...]
    """Further names of the same tensor."""
    dtype: str
    """torch dtype without its prefix."""
    shape: tuple[int, ...]
    """Global and unsharded."""
    kind: TensorKind
    placement: str
    region: Region
    """Unpadded; without elements when the rank holds nothing."""
    tensor: torch.Tensor
    """Detached view of the local memory: shaped like the box, or 1-D for an interval."""
    slot: Slot
    """Where the tensor that the training uses is found."""
    holders: tuple[torch.Tensor, ...] = ()
    """Local tensors known to use this memory; all of them move when it moves."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor found in the tree: what makes it the same tensor, and its adapter."""

    key: Hashable
    shards: Callable[[Names], list[LocalShard]]


Managed = dict[int, dict[str, Entry]]
"""Parameters that a wrapper manages, by id of their module and by their name in it."""


def add_managed(managed: Managed, module: nn.Module, name: str, entry: Entry) -> None:
    """Notes that `module.name` is managed."""
    managed.setdefault(id(module), {})[name] = entry


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as layouts name it, for example "bfloat16"."""
    return str(dtype).removeprefix("torch.")
