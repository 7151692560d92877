"""From a selection to what each rank must send: spans of its arena, and where they land.

Every needed region is read from exactly one of its holders. The snapshot of a rank is
the concatenation of its spans; landings name offsets within it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeAlias

from paramd.errors import UnreachableError
from paramd.layout.dtypes import item_bytes
from paramd.layout.landings import Block, Landing, blocks
from paramd.layout.select import SelectedTensor
from paramd.layout.types import Box, Layout, Piece, Region
from paramd.layout.views import View, views_of

__all__ = ["Block", "Landing", "RankRead", "ReadPlan", "ResultTensor", "blocks", "plan_read"]

Preference: TypeAlias = Callable[[tuple[int, ...]], int] | Mapping[int, float]

MAX_GAP_BYTES = 512
"""Spans this close become one: arenas align tensors, and a span costs more than its padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTensor:
    """One tensor of the answer."""

    name: str
    """The name it was asked by; an alias perhaps."""
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the result: the sizes of `box`."""
    global_shape: tuple[int, ...]
    box: Box
    """The part that is read, in coordinates of the full tensor."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the result, row-major."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRead:
    """What is read from one rank."""

    rank: int
    spans: tuple[tuple[int, int], ...]
    """[begin, end) in bytes of the arena; sorted, neither overlapping nor adjacent."""
    size_bytes: int
    """Length of the snapshot: the sum of the spans."""
    landings: tuple[Landing, ...]
    """By `begin_bytes`. Bytes between them belong to nobody; they overlap only where tensors
    share memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """How a selection is read. Tensors without elements need no rank."""

    tensors: tuple[ResultTensor, ...]
    ranks: tuple[RankRead, ...]
    """Ordered by rank; only those that are needed."""

    @property
    def size_bytes(self) -> int:
        """Bytes that the ranks send together."""
        return sum(read.size_bytes for read in self.ranks)


def plan_read(
    layout: Layout, selection: Iterable[SelectedTensor], *, prefer: Preference | None = None
) -> ReadPlan:
    """Plans to read `selection`, each element once, at the cost of its bytes.

    Args:
        layout: where the tensors lie.
        selection: tensors of this layout and their wanted boxes.
        prefer: how to choose among replicas. A mapping gives each rank's cost for a byte
            (1.0 where it says nothing, infinity where the rank must not be asked), and
            the rank with the least cost so far is taken. A function chooses one of the
            ranks it is given. None costs every rank the same.

    Raises:
        UnreachableError: all holders of a needed region cost infinity.
    """
    chooser = _Chooser(prefer)
    tensors: list[ResultTensor] = []
    reads: dict[int, list[_Found]] = {}
    for number, item in enumerate(selection):
        tensor, size = item.tensor, item_bytes(item.tensor.dtype)
        tensors.append(
            ResultTensor(
                name=item.name,
                fqn=tensor.fqn,
                dtype=tensor.dtype,
                shape=item.box.sizes,
                global_shape=tensor.shape,
                box=item.box,
            )
        )
        holders: dict[Region, list[Piece]] = {}
        for piece in tensor.pieces:
            holders.setdefault(piece.region, []).append(piece)
        for region, pieces in holders.items():
            if not views_of(region, pieces[0].strides, tensor.shape, item.box, size):
                continue
            piece = chooser.choose(pieces, region.numel * size, item.name)
            for view in views_of(region, piece.strides, tensor.shape, item.box, size):
                chooser.charge(piece.rank, view.size_bytes)
                begin_bytes = piece.arena_begin + view.offset_bytes
                reads.setdefault(piece.rank, []).append((begin_bytes, number, view))
    return ReadPlan(
        tensors=tuple(tensors),
        ranks=tuple(_rank_read(rank, reads[rank]) for rank in sorted(reads)),
    )


@dataclass(slots=True)
class _Chooser:
    prefer: Preference | None
    _assigned_bytes: dict[int, int] = field(default_factory=dict)

    def choose(self, pieces: list[Piece], region_bytes: int, name: str) -> Piece:
        prefer = self.prefer
        if prefer is None and len(pieces) == 1:
            return pieces[0]
        by_rank = {piece.rank: piece for piece in pieces}
        if callable(prefer):
            return by_rank[prefer(tuple(sorted(by_rank)))]
        costs = {rank: prefer.get(rank, 1.0) if prefer is not None else 1.0 for rank in by_rank}
        cost, rank = min(
            (costs[rank] * (self._assigned_bytes.get(rank, 0) + region_bytes), rank)
            for rank in by_rank
        )
        if math.isinf(cost):
            raise UnreachableError(
                f"a part of {name!r} is held only by ranks {sorted(by_rank)}, and none of "
                "them can be asked; `paramd status` shows the ranks that answer"
            )
        return by_rank[rank]

    def charge(self, rank: int, size_bytes: int) -> None:
        self._assigned_bytes[rank] = self._assigned_bytes.get(rank, 0) + size_bytes


_Found: TypeAlias = tuple[int, int, View]
"""First byte in the arena, index of the tensor, and the view."""


def _rank_read(rank: int, found: list[_Found]) -> RankRead:
    found.sort(key=itemgetter(0, 1))
    spans: list[tuple[int, int]] = []
    landings: list[Landing] = []
    before_bytes = 0  # of the spans before the last one
    for begin, number, view in found:
        end = begin + view.size_bytes
        if spans and begin <= spans[-1][1] + MAX_GAP_BYTES:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            before_bytes += spans[-1][1] - spans[-1][0] if spans else 0
            spans.append((begin, end))
        landings.append(_landing(view, number, before_bytes + begin - spans[-1][0]))
    return RankRead(
        rank=rank,
        spans=tuple(spans),
        size_bytes=sum(end - begin for begin, end in spans),
        landings=tuple(landings),
    )


def _landing(view: View, number: int, begin_bytes: int) -> Landing:
    return Landing(
        tensor=number,
        begin_bytes=begin_bytes,
        sizes=view.sizes,
        strides=view.strides,
        target=view.target,
        size_bytes=view.size_bytes,
        direct=view.target_begin_bytes is not None,
        target_begin_bytes=view.target_begin_bytes,
    )
