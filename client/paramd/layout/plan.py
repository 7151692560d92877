"""From a selection to what each rank must send: spans of its arena, and where they land.

Every needed region is read from exactly one of its holders. The snapshot of a rank is
the concatenation of its spans; landings name offsets within it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from paramd.errors import UnreachableError
from paramd.layout.dtypes import item_bytes
from paramd.layout.landings import Block, Landing, blocks
from paramd.layout.regions import (
    boxes_of_interval,
    cover_numel,
    flat_interval,
    intersection,
    is_row_major,
    row_major,
)
from paramd.layout.select import SelectedTensor
from paramd.layout.types import Box, Interval, Layout, Piece, Region

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
    reads: dict[int, list[_ArenaLanding]] = {}
    for number, item in enumerate(selection):
        tensor = item.tensor
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
        for piece in tensor.pieces if item.box.numel else ():
            holders.setdefault(piece.region, []).append(piece)
        for pieces in holders.values():
            if not _meets(pieces[0].region, item):
                continue
            piece = chooser.choose(pieces, item)
            found = list(_landings(piece, item, number))
            chooser.charge(piece.rank, sum(one.size_bytes for one in found))
            reads.setdefault(piece.rank, []).extend(found)
    return ReadPlan(
        tensors=tuple(tensors),
        ranks=tuple(_rank_read(rank, reads[rank]) for rank in sorted(reads)),
    )


_ArenaLanding: TypeAlias = Landing
"""A landing whose `begin_bytes` still counts from the begin of the arena."""


@dataclass(slots=True)
class _Chooser:
    prefer: Preference | None
    _assigned_bytes: dict[int, int] = field(default_factory=dict)

    def choose(self, pieces: list[Piece], item: SelectedTensor) -> Piece:
        by_rank = {piece.rank: piece for piece in pieces}
        prefer = self.prefer
        if callable(prefer):
            return by_rank[prefer(tuple(sorted(by_rank)))]
        costs = {rank: prefer.get(rank, 1.0) if prefer is not None else 1.0 for rank in by_rank}
        region = pieces[0].region.numel * item_bytes(item.tensor.dtype)
        _, rank = min(
            (costs[rank] * (self._assigned_bytes.get(rank, 0) + region), rank) for rank in by_rank
        )
        if math.isinf(costs[rank]):
            raise UnreachableError(
                f"a part of {item.name!r} is held only by ranks {sorted(by_rank)}, and none of "
                "them can be asked; `paramd status` shows the ranks that answer"
            )
        return by_rank[rank]

    def charge(self, rank: int, size_bytes: int) -> None:
        self._assigned_bytes[rank] = self._assigned_bytes.get(rank, 0) + size_bytes


def _meets(region: Region, item: SelectedTensor) -> bool:
    if isinstance(region, Box):
        return intersection(region, item.box) is not None
    wanted = flat_interval(item.box, item.tensor.shape)
    if wanted is not None:
        return max(region.begin, wanted.begin) < min(region.end, wanted.end)
    boxes = boxes_of_interval(region, item.tensor.shape)
    return any(intersection(box, item.box) is not None for box in boxes)


def _landings(piece: Piece, item: SelectedTensor, number: int) -> Iterable[_ArenaLanding]:
    size = item_bytes(item.tensor.dtype)
    if isinstance(piece.region, Box):
        strides = piece.strides if piece.strides is not None else row_major(piece.region.sizes)
        yield _box_landing(piece.region, strides, piece.arena_begin, item, number)
        return
    wanted = flat_interval(item.box, item.tensor.shape)
    if wanted is not None:
        yield _interval_landing(piece.region, wanted, piece.arena_begin, size, number)
        return
    begin_bytes = piece.arena_begin
    for box in boxes_of_interval(piece.region, item.tensor.shape):
        if intersection(box, item.box) is not None:
            yield _box_landing(box, row_major(box.sizes), begin_bytes, item, number)
        begin_bytes += box.numel * size


def _interval_landing(
    held: Interval, wanted: Interval, arena_begin: int, item_size: int, number: int
) -> _ArenaLanding:
    begin, end = max(held.begin, wanted.begin), min(held.end, wanted.end)
    return Landing(
        tensor=number,
        begin_bytes=arena_begin + (begin - held.begin) * item_size,
        sizes=(end - begin,),
        strides=(1,),
        target=Interval(begin - wanted.begin, end - wanted.begin),
        size_bytes=(end - begin) * item_size,
        direct=True,
        target_begin_bytes=(begin - wanted.begin) * item_size,
    )


def _box_landing(
    held: Box, strides: tuple[int, ...], arena_begin: int, item: SelectedTensor, number: int
) -> _ArenaLanding:
    """The landing of what `held`, with these strides at `arena_begin`, shares with the item."""
    shared = intersection(held, item.box)
    assert shared is not None, "only regions that meet the wanted box are chosen"
    size = item_bytes(item.tensor.dtype)
    offset = sum((s - h) * st for s, h, st in zip(shared.begin, held.begin, strides, strict=True))
    target = Box(
        tuple(s - w for s, w in zip(shared.begin, item.box.begin, strict=True)),
        tuple(s - w for s, w in zip(shared.end, item.box.begin, strict=True)),
    )
    run = flat_interval(target, item.box.sizes)
    direct = run is not None and is_row_major(target.sizes, strides)
    return Landing(
        tensor=number,
        begin_bytes=arena_begin + offset * size,
        sizes=target.sizes,
        strides=strides,
        target=target,
        size_bytes=cover_numel(target.sizes, strides) * size,
        direct=direct,
        target_begin_bytes=run.begin * size if run is not None and direct else None,
    )


def _rank_read(rank: int, found: list[_ArenaLanding]) -> RankRead:
    found.sort(key=lambda landing: (landing.begin_bytes, landing.tensor))
    spans: list[tuple[int, int]] = []
    landings: list[Landing] = []
    before_bytes = 0  # of the spans before the last one
    for landing in found:
        begin, end = landing.begin_bytes, landing.end_bytes
        if spans and begin <= spans[-1][1] + MAX_GAP_BYTES:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            before_bytes += spans[-1][1] - spans[-1][0] if spans else 0
            spans.append((begin, end))
        landings.append(replace(landing, begin_bytes=before_bytes + begin - spans[-1][0]))
    return RankRead(
        rank=rank,
        spans=tuple(spans),
        size_bytes=sum(end - begin for begin, end in spans),
        landings=tuple(landings),
    )
