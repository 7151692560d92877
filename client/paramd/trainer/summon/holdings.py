"""What this rank holds of each parameter under a module, and where the tree has it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paramd.layout.types import TensorKind
from paramd.trainer.model import fsdp1, fsdp2
from paramd.trainer.model.local_shard import LocalShard
from paramd.trainer.model.names import loaded_class, walk
from paramd.trainer.model.shards import find_tensors


@dataclass(frozen=True, slots=True, eq=False)
class LocalParam:
    """One parameter. Its shards are views of the training's own memory."""

    names: tuple[str, ...]
    """Canonical name first, then the aliases."""
    places: tuple[tuple[nn.Module, str], ...]
    """Every module that has it, and its name there."""
    shards: tuple[LocalShard, ...]
    requires_grad: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Global and unsharded."""
        return self.shards[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0].tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.shards[0].tensor.device


def find_holdings(module: nn.Module, *, recurse: bool) -> list[LocalParam]:
    """The parameters under `module`, in tree order; tied ones once.

    Without `recurse`, those managed by FSDP modules below are left out: what remains is managed
    by `module` itself, if it is an FSDP module, or by no FSDP module.

    Raises:
        ConflictError: a parameter of a kind whose elements cannot be determined exactly.
    """
    left_out = set() if recurse else _managed_below(module)
    found = []
    for tensor in find_tensors(module):
        if tensor.kind is TensorKind.PARAMETER and tensor.entry.key not in left_out:
            shards = tuple(tensor.shards())
            found.append(
                LocalParam(
                    names=tuple(tensor.names),
                    places=tuple(tensor.places),
                    shards=shards,
                    requires_grad=_requires_grad(tensor.places[0], shards[0]),
                )
            )
    return found


def _requires_grad(place: tuple[nn.Module, str], shard: LocalShard) -> bool:
    module, name = place
    # A flat parameter cannot tell for each of the original ones behind it.
    registered = module._parameters.get(name)
    return (registered if registered is not None else shard.slot.tensor()).requires_grad


def _managed_below(module: nn.Module) -> set[object]:
    modules = [inner for _, inner in walk(module)]
    root = next((inner for inner in modules if is_fsdp(inner)), None)
    own = root if root is not None and _wraps(module, root) else None
    mine = _keys([own]) if own is not None else set()
    return _keys([inner for inner in modules if inner is not own]) - mine


def _wraps(module: nn.Module, inner: nn.Module) -> bool:
    """Whether only wrappers (DDP, torch.compile, ...) are between the two."""
    chain = [found for prefix, found in walk(module) if prefix == ""]
    return any(found is inner for found in chain)


def _keys(modules: Sequence[nn.Module]) -> set[object]:
    managed = fsdp1.managed(modules) | fsdp2.managed(modules)
    return {entry.key for names in managed.values() for entry in names.values()}


def is_fsdp(module: nn.Module) -> bool:
    """Whether it is a FullyShardedDataParallel or `fully_shard` module."""
    return any(
        cls is not None and isinstance(module, cls)
        for cls in (
            loaded_class(
                "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
            ),
            loaded_class("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"),
        )
    )


def digest(holdings: Sequence[LocalParam]) -> str:
    """A short digest, equal on all ranks that have the same parameters."""
    text = repr([(h.names, h.shape, h.shards[0].dtype, h.requires_grad) for h in holdings])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
