"""DeepSpeed's ZeRO: the optimizer's full-precision partitions are the parameters.

What is updated is a flat partition of each rank (of a parameter group in stages 1 and 2, of the
parameters one by one in stage 3); the module computes with copies of it, which DeepSpeed makes
after every step. So a rank holds an interval of each parameter's flattened elements, possibly
empty, in the precision of the partition, and what is written there reaches the module by `refresh`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from paramd.errors import ConflictError
from paramd.layout.types import Interval, TensorKind
from paramd.trainer.model import plain
from paramd.trainer.model.local_shard import (
    Entry,
    LocalShard,
    Managed,
    Names,
    Slot,
    add_managed,
    dtype_name,
)


class Partitions(Protocol):
    """What paramd.integrations.deepspeed knows of one ZeRO optimizer."""

    stage: int
    dtype: torch.dtype
    world_size: int

    def flats(self) -> list[torch.Tensor]:
        """This rank's flat partitions, in an order that does not change."""

    def part(self, param: nn.Parameter) -> tuple[int, int, int, int] | None:
        """Which flat partition has its elements, from where, the first one's index, and their
        number; None if this rank has none."""

    def unlisted(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
        """The flat partitions of this optimizer that none of its groups lists between two steps,
        each with the index of its group."""

    def refresh(self) -> None:
        """Make the module's copies from the partitions of all ranks. Collective."""


declared: WeakKeyDictionary[nn.Module, Partitions] = WeakKeyDictionary()
"""The modules whose parameters are partitioned, by who knows how."""


def managed(model: nn.Module, modules: Iterable[nn.Module]) -> Managed:
    """The parameters that DeepSpeed has partitioned; see `check_declared`."""
    found: Managed = {}
    partitions = declared.get(model)
    if partitions is None:
        return found
    slots = _slots(partitions)
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and _is_partitioned(param):
                add_managed(found, module, name, _entry(partitions, slots, param))
    return found


def check_declared(model: nn.Module) -> None:
    """Raise ConflictError if DeepSpeed has partitioned parameters, and nobody declared how."""
    name = partitioned(model) if model not in declared else ""
    if name:
        raise ConflictError(
            f"parameter {name!r} is partitioned by DeepSpeed; attach its engine, by "
            "paramd.integrations.deepspeed.attach(engine, job=NAME)"
        )


def partitioned(model: nn.Module) -> str:
    """The name of a parameter that DeepSpeed has partitioned; empty if there is none."""
    return next((name for name, param in model.named_parameters() if _is_partitioned(param)), "")


def _is_partitioned(param: nn.Parameter) -> bool:
    return hasattr(param, "_hp_mapping") or hasattr(param, "ds_id")


def masters(model: nn.Module) -> list[torch.Tensor]:
    """The flat partitions that stand for the model's parameters; empty without DeepSpeed."""
    partitions = declared.get(model)
    return partitions.flats() if partitions is not None else []


def unlisted(optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
    """The parameters of an optimizer that none of its groups lists, with the index of theirs."""
    return [found for one in list(declared.values()) for found in one.unlisted(optimizer)]


def refresh(model: nn.Module) -> None:
    """After an edit of all ranks: let it reach the copies with which the module computes."""
    partitions = declared.get(model)
    if partitions is not None:
        partitions.refresh()


def _slots(partitions: Partitions) -> list[Slot]:
    # One table for all, so that a partition with many parameters is watched once.
    table = {str(index): flat for index, flat in enumerate(partitions.flats())}
    return [Slot(table, key) for key in table]


def _entry(partitions: Partitions, slots: list[Slot], param: nn.Parameter) -> Entry:
    return Entry(id(param), lambda names: [_shard(partitions, slots, param, names)])


def _shard(
    partitions: Partitions, slots: list[Slot], param: nn.Parameter, names: Names
) -> LocalShard:
    shape = tuple(getattr(param, "ds_shape", param.shape))
    found = partitions.part(param)
    if found is None:
        nothing = torch.empty(0, dtype=partitions.dtype)
        region, view, slot = Interval(0, 0), nothing, Slot({names[0]: nothing}, names[0])
        holders: tuple[torch.Tensor, ...] = ()
    else:
        index, offset, begin, numel = found
        slot = slots[index]
        flat = slot.tensor()
        plain.check_supported(names[0], flat)
        region, view = Interval(begin, begin + numel), flat.detach()[offset : offset + numel]
        holders = (flat,)
    return LocalShard(
        fqn=names[0],
        aliases=names[1:],
        dtype=dtype_name(partitions.dtype),
        shape=shape,
        kind=TensorKind.PARAMETER,
        placement=f"ZeRO-{partitions.stage} over {partitions.world_size}",
        region=region,
        tensor=view,
        slot=slot,
        holders=holders,
    )
