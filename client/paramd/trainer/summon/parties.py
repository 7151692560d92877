"""Which ranks take part in a call, and over which process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paramd.trainer.summon.wire import Wire
from paramd.trainer.summon.wrappers import FlatParameters, ShardedParameters

_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
"""Process groups created for parties smaller than the world."""


@dataclass(frozen=True, slots=True)
class Participants:
    """The ranks of a call, ascending, this one included."""

    ranks: tuple[int, ...]

    def wire(self, devices: Sequence[torch.device]) -> Wire:
        """The wire between them, for tensors on these devices. Collective on first use."""
        if len(self.ranks) == 1:
            return Wire(ranks=self.ranks, index=0, group=None, device=torch.device("cpu"))
        group = _group_of(self.ranks)
        return Wire(
            ranks=self.ranks,
            index=self.ranks.index(dist.get_rank()),
            group=group,
            device=_wire_device(group, devices),
        )


def find_party(flat: FlatParameters, sharded: ShardedParameters) -> Participants:
    """All ranks, or those of the FSDP modules if these all span the same subset.

    So each pipeline stage, a model of its own, can be summoned separately.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Participants((0,))
    parties = flat.parties() | sharded.parties()
    if len(parties) == 1:
        (ranks,) = parties
        return Participants(ranks)
    return Participants(tuple(range(dist.get_world_size())))


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == dist.get_world_size():
        return world
    key = (world.group_name, ranks)
    if key not in _groups:
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="paramd")
        assert isinstance(group, dist.ProcessGroup)
        _groups[key] = group
    return _groups[key]


def _wire_device(group: dist.ProcessGroup, devices: Sequence[torch.device]) -> torch.device:
    """The tensors' device, if the backend supports it; else the backend's own."""
    types = [device.type for device in group._device_types]
    for device in devices:
        if device.type in types:
            return device
    if types[0] == "cpu":
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())
