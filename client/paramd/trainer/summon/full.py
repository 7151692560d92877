"""The full tensors of one call: filled from all ranks' shards, swapped in and out, written back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from paramd.layout.codec import decode_local, encode_local
from paramd.layout.merge import LocalLayout, merge_layouts
from paramd.layout.plan import holders_of
from paramd.layout.types import Interval, Layout, Piece, Region, TensorKind, TensorLayout
from paramd.trainer.model.local_shard import LocalShard
from paramd.trainer.summon.guards import summoned
from paramd.trainer.summon.wire import Part, Wire, plan_streams, write_changes

Place = tuple[nn.Module, str]


@dataclass(slots=True)
class _Before:
    """A module's state before the swap."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]
    """The whole table, since its order matters."""
    attributes: dict[str, Any]
    """Attributes that shadowed a parameter of the same name."""
    ours: set[str]


class Swap:
    """The places of one call. `restore` puts the original objects back."""

    def __init__(self) -> None:
        self._before: dict[int, _Before] = {}
        self._announced: list[tuple[int, str]] = []

    def announce(self, places: Iterable[Place], name: str) -> None:
        """Mark these places as summoned, whether or not this rank swaps them."""
        for module, attribute in places:
            summoned[id(module), attribute] = name
            self._announced.append((id(module), attribute))

    def hide(self, place: Place) -> None:
        module, name = place
        self._remember(module).ours.add(name)
        module._parameters.pop(name, None)

    def put(self, place: Place, param: nn.Parameter) -> None:
        module, name = place
        before = self._remember(module)
        before.ours.add(name)
        if name in vars(module):
            # FSDP1 leaves views of its flat parameter as plain attributes.
            before.attributes[name] = vars(module).pop(name)
        module._parameters[name] = param

    def found(self, place: Place) -> torch.Tensor | None:
        """The tensor at `place` now; the block may have replaced it."""
        module, name = place
        value = module._parameters.get(name)
        return value if value is not None else vars(module).get(name)

    def restore(self) -> None:
        """Restore everything, keeping what the block registered under new names."""
        for before in self._before.values():
            table = before.module._parameters
            new = {
                k: v for k, v in table.items() if k not in before.ours | before.parameters.keys()
            }
            table.clear()
            table.update(before.parameters)
            table.update(new)
            for name in before.ours:
                vars(before.module).pop(name, None)
            vars(before.module).update(before.attributes)
        self._before.clear()
        for key in self._announced:
            summoned.pop(key, None)
        self._announced.clear()

    def _remember(self, module: nn.Module) -> _Before:
        before = _Before(module, dict(module._parameters), {}, set())
        return self._before.setdefault(id(module), before)


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """This rank's part of one tensor; possibly nothing."""

    name: str
    shape: tuple[int, ...]
    """Global and unsharded."""
    dtype: torch.dtype
    device: torch.device
    """Device of the full tensor, unless it is offloaded."""
    shards: tuple[LocalShard, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """One region of one tensor, and the positions of the ranks holding it."""

    name: str
    region: Region
    holders: tuple[int, ...]


class FullTensors:
    """Fills full tensors and writes them back. Collective, in the same order on all ranks.

    Covers tensors of which any rank has elements; others are left out. `device` of the full
    tensors: None keeps each on its shards' device. Raises UsageError if ranks disagree on a tensor,
    or no rank holds some of its elements.
    """

    def __init__(
        self, wire: Wire, locals: Sequence[Local], *, rank0_only: bool, device: torch.device | None
    ) -> None:
        self._wire = wire
        self._rank0_only = rank0_only
        layout = _merged(wire, locals)
        self.names = frozenset(tensor.fqn for tensor in layout.tensors)
        dtypes = {tensor.fqn: getattr(torch, tensor.dtype) for tensor in layout.tensors}
        self._locals = {
            local.name: replace(local, dtype=dtypes[local.name])
            for local in locals
            if local.name in dtypes
        }
        self._own: dict[tuple[str, Region], torch.Tensor] = {
            (local.name, shard.region): shard.tensor
            for local in self._locals.values()
            for shard in local.shards
            if shard.region.numel
        }
        self._parts = _parts(layout)
        self._device = device
        sizes = [prod(local.shape) * local.dtype.itemsize for local in self._locals.values()]
        self._budget_bytes = max(sizes, default=0)

    @property
    def shows(self) -> bool:
        """Whether this rank gets full tensors."""
        return not self._rank0_only or self._wire.index == 0

    def fill(self) -> dict[str, torch.Tensor]:
        """New full tensors by name; empty if this rank gets none. Collective."""
        full: dict[str, torch.Tensor] = {}
        if self.shows:
            for name, local in self._locals.items():
                device = self._device if self._device is not None else local.device
                full[name] = torch.empty(local.shape, dtype=local.dtype, device=device)
            for (name, region), view in self._own.items():
                region_of(full[name], region).copy_(view)
        receivers = (0,) if self._rank0_only else tuple(range(self._wire.world_size))
        moving = [part for part in self._parts if not set(receivers) <= set(part.holders)]
        self._wire.gather(
            plan_streams([self._part(part) for part in moving], self._wire.world_size),
            self._views(moving),
            {
                index: region_of(full[part.name], part.region)
                for index, part in enumerate(moving)
                if full and (part.name, part.region) not in self._own
            },
            only_to_first=self._rank0_only,
            budget_bytes=self._budget_bytes,
        )
        return full

    def write_back(self, edited: Mapping[str, torch.Tensor]) -> None:
        """Write edited tensors to all shards. Collective if only the first rank has them.

        `edited`: full tensors of any dtype and device; tensors left out keep their values. If only
        the first rank has full tensors, its choice holds for all.
        """
        same = {
            name: value.detach().to(self._locals[name].dtype).contiguous()
            for name, value in edited.items()
        }
        for (name, region), view in self._own.items():
            if name in same:
                write_changes(view, region_of(same[name], region))
        if self._rank0_only:
            self._distribute(same)

    def _distribute(self, edited: Mapping[str, torch.Tensor]) -> None:
        """Send the first rank's tensors to the ranks holding parts of them."""
        world_size = self._wire.world_size
        elsewhere = [part for part in self._parts if set(part.holders) - {0}]
        single = [part for part in elsewhere if len(set(part.holders) - {0}) == 1]
        shared = [part for part in elsewhere if len(set(part.holders) - {0}) > 1]
        streams = plan_streams([self._part(part, of_first=False) for part in single], world_size)
        self._wire.scatter(
            streams, _regions(single, edited), self._views(single), self._budget_bytes
        )
        (stream,) = plan_streams([self._part(part, one=True) for part in shared], 1)
        self._wire.broadcast(
            stream, _regions(shared, edited), self._views(shared), self._budget_bytes
        )

    def _part(self, part: _Part, *, of_first: bool = True, one: bool = False) -> Part:
        holders = part.holders if of_first else tuple(h for h in part.holders if h != 0)
        return Part(
            numel=part.region.numel,
            item_bytes=self._locals[part.name].dtype.itemsize,
            senders=(0,) if one else holders,
        )

    def _views(self, parts: Iterable[_Part]) -> dict[int, torch.Tensor]:
        return {
            index: self._own[part.name, part.region]
            for index, part in enumerate(parts)
            if (part.name, part.region) in self._own
        }


def region_of(full: torch.Tensor, region: Region) -> torch.Tensor:
    """The region's view of a row-major full tensor: a box, or 1-D for an interval."""
    if isinstance(region, Interval):
        return full.view(-1)[region.begin : region.end]
    return full[tuple(map(slice, region.begin, region.end))]


def _regions(parts: Iterable[_Part], full: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {
        index: region_of(full[part.name], part.region)
        for index, part in enumerate(parts)
        if part.name in full
    }


def _merged(wire: Wire, locals: Sequence[Local]) -> Layout:
    mine = encode_local(_described(wire.index, locals))
    everybody = [decode_local(data) for data in wire.exchange(mine)]
    # A rank without elements of a gradient does not know if it exists, nor its dtype.
    holders: dict[str, TensorLayout] = {}
    for local in everybody:
        for tensor in local.tensors:
            if tensor.pieces:
                holders.setdefault(tensor.fqn, tensor)
    return merge_layouts([_known(local, holders) for local in everybody])


def _known(local: LocalLayout, holders: Mapping[str, TensorLayout]) -> LocalLayout:
    tensors = tuple(
        tensor if tensor.pieces else replace(tensor, dtype=holders[tensor.fqn].dtype)
        for tensor in local.tensors
        if tensor.fqn in holders
    )
    return replace(local, tensors=tensors)


def _described(index: int, locals: Sequence[Local]) -> LocalLayout:
    """A local layout without an arena: its offsets only number the bytes."""
    tensors, end = [], 0
    for local in locals:
        pieces = []
        for shard in local.shards:
            pieces.append(Piece(rank=index, arena_begin=end, region=shard.region))
            end += shard.region.numel * shard.tensor.itemsize
        tensors.append(
            TensorLayout(
                fqn=local.name,
                dtype=str(local.dtype).removeprefix("torch."),
                shape=local.shape,
                kind=TensorKind.PARAMETER,
                placement="",
                pieces=tuple(pieces),
            )
        )
    return LocalLayout(rank=index, arena_bytes=end, tensors=tuple(tensors))


def _parts(layout: Layout) -> list[_Part]:
    return [
        _Part(tensor.fqn, pieces[0].region, tuple(piece.rank for piece in pieces))
        for tensor in layout.tensors
        for pieces in holders_of(tensor.pieces)
    ]
