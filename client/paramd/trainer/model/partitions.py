"""Parameters that an optimizer keeps in separate tensors: DeepSpeed's ZeRO, Megatron-Core.

An update changes not the module's parameter but a partition: a tensor in full precision with
elements of one or several parameters, often in part and only on this rank. The module computes
with copies, which are made after every step. So the partitions are the parameters: a rank holds
the regions that lie in its own, possibly none, in their precision, and `refresh` brings writes to
them to the module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from paramd.errors import ConflictError
from paramd.layout.types import Box, Interval, Region, TensorKind
from paramd.trainer.model import plain
from paramd.trainer.model.local_shard import Entry, LocalShard, Managed, Names, Slot, dtype_name


@dataclass(frozen=True, slots=True)
class Part:
    """A region of a parameter, and where its elements are."""

    partition: int
    offset: int
    """The first one's index in the flattened partition; the others follow it."""
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One parameter that is kept in partitions."""

    shape: tuple[int, ...]
    """Global and unsharded."""
    placement: str
    parts: tuple[Part, ...]
    """This rank's parts; possibly none."""


class Partitions(Protocol):
    """An integration's knowledge of one optimizer's partitions."""

    dtype: str
    """Dtype of all partitions, without torch's prefix."""

    def tensors(self) -> list[torch.Tensor]:
        """This rank's partitions, in an order that does not change."""

    def kept(self, param: nn.Parameter) -> Kept | None:
        """The place of a module's parameter; None if the optimizer updates it itself."""

    def unlisted(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
        """The partitions that none of this optimizer's groups lists between two steps, each with
        the index of its group.
        """

    def refresh(self) -> None:
        """Make the module's copies from the partitions of all ranks. Collective."""


declared: WeakKeyDictionary[nn.Module, Partitions] = WeakKeyDictionary()
"""The modules whose parameters are kept in partitions, with their integration's knowledge."""


@dataclass(frozen=True, slots=True)
class _Keeper:
    """A package whose parameters paramd must not serve as they are."""

    marks: tuple[str, ...]
    """Attributes that it adds to parameters; any one identifies it."""
    said: str
    attach: str
    gather: str = ""


_KEEPERS = (
    _Keeper(
        marks=("_hp_mapping", "ds_id"),
        said="partitioned by DeepSpeed",
        attach="paramd.integrations.deepspeed.attach(engine, job=NAME)",
        gather="gather it with deepspeed.zero.GatheredParameters, or ",
    ),
    _Keeper(
        marks=("grad_added_to_main_grad",),
        said="in the buffers of Megatron-Core",
        attach="paramd.integrations.megatron.attach(model, optimizer, job=NAME)",
    ),
)


def managed(model: nn.Module, modules: Iterable[nn.Module]) -> Managed:
    """The parameters that are kept in partitions; see `check_declared`."""
    found: Managed = {}
    partitions = declared.get(model)
    if partitions is None:
        return found
    # One table for all, so that a partition with many parameters is watched once.
    table = {str(index): tensor for index, tensor in enumerate(partitions.tensors())}
    slots = [Slot(table, key) for key in table]
    for module in modules:
        for name, param in module._parameters.items():
            kept = partitions.kept(param) if param is not None else None
            if kept is not None:
                entry = _entry(partitions.dtype, slots, param, kept)
                found.setdefault(id(module), {})[name] = entry
    return found


def check_declared(model: nn.Module) -> None:
    """Raise ConflictError if parameters are kept in partitions that no integration declared."""
    found = _kept_by_somebody(model) if model not in declared else None
    if found is not None:
        name, keeper = found
        raise ConflictError(f"parameter {name!r} is {keeper.said}; attach by {keeper.attach}")


def check_local(model: nn.Module) -> None:
    """Raise ConflictError if the module's parameters are not what is trained."""
    found = _kept_by_somebody(model)
    if found is not None:
        name, keeper = found
        raise ConflictError(
            f"parameter {name!r} is {keeper.said}; {keeper.gather}attach by {keeper.attach} and "
            "read the mesh"
        )


def _kept_by_somebody(model: nn.Module) -> tuple[str, _Keeper] | None:
    for name, param in model.named_parameters():
        for keeper in _KEEPERS:
            if any(hasattr(param, mark) for mark in keeper.marks):
                return name, keeper
    return None


def unlisted(optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
    """The parameters of an optimizer that none of its groups lists, with the index of theirs."""
    return [found for one in list(declared.values()) for found in one.unlisted(optimizer)]


def refresh(model: nn.Module) -> None:
    """After an edit of all ranks: let it reach the copies with which the module computes."""
    partitions = declared.get(model)
    if partitions is not None:
        with torch.no_grad():
            partitions.refresh()


def _entry(dtype: str, slots: list[Slot], param: object, kept: Kept) -> Entry:
    return Entry(id(param), lambda names: _shards(dtype, slots, kept, names))


def _shards(dtype: str, slots: list[Slot], kept: Kept, names: Names) -> list[LocalShard]:
    found: list[tuple[Region, torch.Tensor, Slot, tuple[torch.Tensor, ...]]] = []
    for part in kept.parts:
        whole = slots[part.partition].tensor()
        plain.check_supported(names[0], whole)
        view = whole.detach().view(-1)[part.offset : part.offset + part.region.numel]
        if isinstance(part.region, Box):
            view = view.view(part.region.sizes)
        found.append((part.region, view, slots[part.partition], (whole,)))
    if not found:
        nothing = torch.empty(0, dtype=getattr(torch, dtype))
        found = [(Interval(0, 0), nothing, Slot({names[0]: nothing}, names[0]), ())]
    return [
        LocalShard(
            fqn=names[0],
            aliases=names[1:],
            dtype=dtype_name(view.dtype),
            shape=kept.shape,
            kind=TensorKind.PARAMETER,
            placement=kept.placement,
            region=region,
            tensor=view,
            slot=slot,
            holders=holders,
        )
        for region, view, slot, holders in found
    ]
