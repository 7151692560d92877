"""Read a snapshot where it lies: shards as tensors on its memory, without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from paramd.errors import NotFoundError, UsageError
from paramd.layout.landings import Landing
from paramd.layout.plan import ReadPlan
from paramd.layout.regions import full_box
from paramd.layout.types import Region
from paramd.mesh.reading.assemble import torch_dtype
from paramd.mesh.results import text_table

Shard: TypeAlias = tuple[Region, torch.Tensor]
"""Which part of the tensor, in coordinates of what was asked for, and its values."""


class SnapshotView(Mapping[str, Sequence[Shard]]):
    """Shards by name, all at one step, on the sidecars' own snapshot memory.

    The values never change: neither when training goes on, nor after the view has ended.
    Writing to a tensor is harmless: it changes this process's copy of that page alone.
    """

    def __init__(
        self,
        plan: ReadPlan,
        names: Sequence[tuple[str, ...]],
        memories: Mapping[int, mmap.mmap],
        *,
        job: str,
        epoch: int,
        step: int,
        unsettled: bool = False,
    ) -> None:
        self.job = job
        """Name of the job."""
        self.epoch = epoch
        """Incarnation of the job."""
        self.step = step
        """Finished updates: the version that every value here belongs to."""
        self.unsettled = unsettled
        """As in `Summoned`: training has not gone on since that step."""
        self._shards = _shards(plan, names, memories)
        self._shapes = {
            name: tensor.shape
            for tensor, tied in zip(plan.tensors, names, strict=True)
            for name in tied
        }

    def __getitem__(self, name: str) -> Sequence[Shard]:
        return self._shards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, when one rank holds it in one piece.

        Raises:
            NotFoundError: no such name is in the view.
            UsageError: several pieces make it up; `summon` puts them together.
        """
        if name not in self._shards:
            raise NotFoundError(f"{name!r} is not in this view; it has {len(self)} names")
        shards, shape = self._shards[name], self._shapes[name]
        if len(shards) != 1:
            raise UsageError(
                f"{name!r} consists of {len(shards)} shards; take them one by one "
                f"(view[{name!r}]), or summon it"
            )
        ((_, tensor),) = shards
        return tensor if tensor.shape == shape else tensor.view(shape)

    def __repr__(self) -> str:
        rows = [[name, str(list(self._shapes[name])), str(len(s))] for name, s in self.items()]
        below = f"{len(self)} tensors of {self.job!r} at step {self.step} (epoch {self.epoch})"
        return text_table(["name", "shape", "shards"], rows[:40], below)

    def drop(self) -> None:
        """Lets go of all tensors that nobody else holds."""
        self._shards = {}


def _shards(
    plan: ReadPlan, names: Sequence[tuple[str, ...]], memories: Mapping[int, mmap.mmap]
) -> dict[str, list[Shard]]:
    found: list[list[Shard]] = [[] for _ in plan.tensors]
    for read in plan.ranks:
        for landing in read.landings:
            dtype = torch_dtype(plan.tensors[landing.tensor].dtype)
            tensor = _shard(memories[read.rank], landing, dtype)
            found[landing.tensor].append((landing.target, tensor))
    for number, result in enumerate(plan.tensors):
        if 0 in result.shape:
            empty = torch.empty(result.shape, dtype=torch_dtype(result.dtype))
            found[number].append((full_box(result.shape), empty))
    return {name: found[number] for number, tied in enumerate(names) for name in tied}


def _shard(memory: mmap.mmap, landing: Landing, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.frombuffer(
        memory, dtype=torch.uint8, count=landing.size_bytes, offset=landing.begin_bytes
    )
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # spans of odd lengths came before it; torch wants aligned memory
    return flat.view(dtype).as_strided(landing.sizes, landing.strides)
