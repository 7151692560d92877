"""Plan a read: from a selection to the spans each rank sends, and where their elements land.

Every region is read from exactly one of its holders, and all of them from one replica: equal
regions of several ranks need not have equal values (buffers, local SGD). A rank's snapshot is the
concatenation of its spans; a `Landing` places part of it in a result, by its offset in the
snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from operator import itemgetter
from typing import TypeAlias, TypeVar

from paramd.errors import UnreachableError, UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.select import SelectedTensor
from paramd.layout.types import (
    Box,
    Interval,
    Layout,
    Piece,
    Region,
    TensorLayout,
    boxes_of_interval,
    cover_numel,
    flat_interval,
    full_box,
    intersection,
    is_row_major,
    joined,
    offsets_in,
    row_major,
)

Costs: TypeAlias = Mapping[int, float]
"""Costs of reading from ranks that are not preferred; infinity excludes one."""

MAX_GAP_BYTES = 512
"""Spans this close are merged: a span costs more than the alignment padding between tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A strided view of one rank's snapshot, and the part of one result it fills."""

    tensor: int = 0
    """Index into the plan's tensors."""
    begin_bytes: int
    """Offset within the snapshot of the view's first element."""
    sizes: tuple[int, ...]
    """Elements in each dim of the view; never 0."""
    strides: tuple[int, ...]
    """Element strides in the snapshot."""
    target: Region
    """Box of the result, or interval of the row-major flattened result."""
    size_bytes: int
    """Bytes of the snapshot from the view's first to its last element, both included."""
    target_begin_bytes: int | None = None
    """Offset of the bytes in the result; None unless `direct`."""

    @property
    def direct(self) -> bool:
        """Whether these bytes are contiguous in the row-major result: a plain copy suffices."""
        return self.target_begin_bytes is not None

    @property
    def end_bytes(self) -> int:
        """Offset within the snapshot after the view's last element."""
        return self.begin_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a landing copied at once: a view with the landing's strides."""

    begin_bytes: int
    """Offset within the snapshot of its first element."""
    end_bytes: int
    """Offset within the snapshot after its last element."""
    target: Box
    """The part it fills, in coordinates of the result; it has the sizes of the view."""


def blocks(landing: Landing, item_bytes: int, max_bytes: int) -> Iterator[Block]:
    """Split a landing into disjoint blocks of at most `max_bytes`, in memory order.

    A stream reader fills a scratch buffer of `max_bytes` block by block and makes one strided copy
    of each. Bytes between blocks are unused.

    Raises:
        UsageError: If `max_bytes` is below one element.
    """
    if max_bytes < item_bytes:
        raise UsageError(f"max_bytes is {max_bytes}; expected at least one item of {item_bytes}")
    assert isinstance(landing.target, Box), "an interval is always direct"
    # Largest stride first is memory order, whatever the order of the dims.
    order = sorted(range(len(landing.sizes)), key=lambda dim: -landing.strides[dim])
    cut = _Cut(landing, order, item_bytes, max_bytes // item_bytes)
    yield from cut.blocks([0] * len(landing.sizes), list(landing.sizes), 0)


@dataclass(frozen=True, slots=True)
class _Cut:
    landing: Landing
    order: Sequence[int]
    item_bytes: int
    max_numel: int

    def blocks(self, begin: list[int], end: list[int], level: int) -> Iterator[Block]:
        """Blocks of the view's part [begin, end); dims of `order` before `level` are done."""
        sizes = [e - b for b, e in zip(begin, end, strict=True)]
        strides = self.landing.strides
        if cover_numel(sizes, strides) <= self.max_numel:
            yield self._block(begin, end)
            return
        dim = self.order[level]
        row = cover_numel([*sizes[:dim], 1, *sizes[dim + 1 :]], strides)
        rows = max(1, 1 + (self.max_numel - row) // max(strides[dim], 1))
        for low in range(begin[dim], end[dim], rows):
            inner_begin, inner_end = list(begin), list(end)
            inner_begin[dim], inner_end[dim] = low, min(low + rows, end[dim])
            yield from self.blocks(inner_begin, inner_end, level + 1)

    def _block(self, begin: list[int], end: list[int]) -> Block:
        landing, strides = self.landing, self.landing.strides
        assert isinstance(landing.target, Box)
        offset = sum(b * stride for b, stride in zip(begin, strides, strict=True))
        sizes = [e - b for b, e in zip(begin, end, strict=True)]
        first_bytes = landing.begin_bytes + offset * self.item_bytes
        origin = landing.target.begin
        return Block(
            begin_bytes=first_bytes,
            end_bytes=first_bytes + cover_numel(sizes, strides) * self.item_bytes,
            target=Box(
                tuple(o + b for o, b in zip(origin, begin, strict=True)),
                tuple(o + e for o, e in zip(origin, end, strict=True)),
            ),
        )


def as_boxes(landing: Landing, shape: Sequence[int], item_bytes: int) -> Iterator[Landing]:
    """A landing as one or several whose targets are boxes of a result of this shape."""
    if isinstance(landing.target, Box):
        yield landing
        return
    begin_bytes = landing.begin_bytes
    for box in boxes_of_interval(landing.target, shape):
        yield Landing(
            tensor=landing.tensor,
            begin_bytes=begin_bytes,
            sizes=box.sizes,
            strides=row_major(box.sizes),
            target=box,
            size_bytes=box.numel * item_bytes,
        )
        begin_bytes += box.numel * item_bytes


@lru_cache(maxsize=8192)
def views_of(
    held: Region, strides: tuple[int, ...] | None, shape: tuple[int, ...], wanted: Box, size: int
) -> tuple[Landing, ...]:
    """The views of `wanted` in a piece of region `held`; none if they share no element.

    They begin relative to the piece, so that the layers of a model share cached ones.
    """
    if isinstance(held, Box):
        steps = strides if strides is not None else row_major(held.sizes)
        return _box_views(held, steps, wanted, size, 0)
    if not wanted.numel:
        return ()
    run = flat_interval(wanted, shape)
    if run is not None:
        return _interval_views(held, run, size)
    views: list[Landing] = []
    offset_bytes = 0
    for box in boxes_of_interval(held, shape):
        views.extend(_box_views(box, row_major(box.sizes), wanted, size, offset_bytes))
        offset_bytes += box.numel * size
    return tuple(views)


def _interval_views(held: Interval, wanted: Interval, size: int) -> tuple[Landing, ...]:
    begin, end = max(held.begin, wanted.begin), min(held.end, wanted.end)
    if begin >= end:
        return ()
    view = Landing(
        begin_bytes=(begin - held.begin) * size,
        sizes=(end - begin,),
        strides=(1,),
        target=Interval(begin - wanted.begin, end - wanted.begin),
        size_bytes=(end - begin) * size,
        target_begin_bytes=(begin - wanted.begin) * size,
    )
    return (view,)


def _box_views(
    held: Box, strides: tuple[int, ...], wanted: Box, size: int, held_offset_bytes: int
) -> tuple[Landing, ...]:
    shared = intersection(held, wanted)
    if shared is None:
        return ()
    offset = sum((s - h) * st for s, h, st in zip(shared.begin, held.begin, strides, strict=True))
    target = Box(
        tuple(s - w for s, w in zip(shared.begin, wanted.begin, strict=True)),
        tuple(s - w for s, w in zip(shared.end, wanted.begin, strict=True)),
    )
    run = flat_interval(target, wanted.sizes) if is_row_major(target.sizes, strides) else None
    view = Landing(
        begin_bytes=held_offset_bytes + offset * size,
        sizes=target.sizes,
        strides=strides,
        target=target,
        size_bytes=cover_numel(target.sizes, strides) * size,
        target_begin_bytes=run.begin * size if run is not None else None,
    )
    return (view,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTensor:
    name: str
    """The name it was requested by; possibly an alias."""
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the result: the sizes of `box`."""
    global_shape: tuple[int, ...]
    box: Box
    """The part read, in coordinates of the full tensor."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the result, row-major."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRead:
    rank: int
    spans: tuple[tuple[int, int], ...]
    """[begin, end) in bytes of the arena; sorted, neither overlapping nor adjacent."""
    size_bytes: int
    """Length of the snapshot: the sum of the spans."""
    landings: tuple[Landing, ...]
    """Ordered by `begin_bytes`; they overlap only where tensors share memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """How to read a selection. Empty tensors need no rank."""

    tensors: tuple[ResultTensor, ...]
    ranks: tuple[RankRead, ...]
    """Ordered by rank; only those needed."""
    replica: int = 0
    """The replica that is read, named by a rank of it."""

    @property
    def size_bytes(self) -> int:
        """Bytes sent by all ranks together."""
        return sum(read.size_bytes for read in self.ranks)

    def only(self, numbers: Sequence[int]) -> ReadPlan:
        """The part for these of its tensors, in this order, over the same snapshots."""
        places = {number: place for place, number in enumerate(numbers)}
        ranks = []
        for read in self.ranks:
            landings = tuple(
                replace(one, tensor=places[one.tensor])
                for one in read.landings
                if one.tensor in places
            )
            if landings:
                ranks.append(replace(read, landings=landings))
        tensors = tuple(self.tensors[number] for number in numbers)
        return ReadPlan(tensors=tensors, ranks=tuple(ranks), replica=self.replica)

    def part(self, number: int, box: Box) -> ReadPlan:
        """The part for a box of one of its tensors, in coordinates of that result, over the same
        snapshots."""
        tensor = self.tensors[number]
        size = item_bytes(tensor.dtype)
        ranks = []
        for read in self.ranks:
            landings = [
                replace(view, begin_bytes=one.begin_bytes + view.begin_bytes)
                for one in read.landings
                if one.tensor == number
                for view in views_of(one.target, one.strides, tensor.shape, box, size)
            ]
            landings.sort(key=lambda one: one.begin_bytes)
            if landings:
                ranks.append(replace(read, landings=tuple(landings)))
        begin = tuple(o + b for o, b in zip(tensor.box.begin, box.begin, strict=True))
        end = tuple(o + e for o, e in zip(tensor.box.begin, box.end, strict=True))
        result = replace(tensor, shape=box.sizes, box=Box(begin, end))
        return ReadPlan(tensors=(result,), ranks=tuple(ranks), replica=self.replica)


def consecutive(shape: Sequence[int], most_numel: int) -> Iterator[Box]:
    """Boxes of at most `most_numel` elements that make up the row-major result of this shape, one
    after the other.

    Raises:
        UsageError: If `most_numel` is below 1.
    """
    if most_numel < 1:
        raise UsageError(f"most_numel: {most_numel}; expected at least 1")
    numel, begin = math.prod(shape), [0] * len(shape)
    if numel <= most_numel:
        yield full_box(tuple(shape))
        return
    # The first dim of which several steps fit, or one at least, into a box.
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most_numel)
    steps = most_numel // math.prod(shape[dim + 1 :])
    for outer in product(*(range(size) for size in shape[:dim])):
        for low in range(0, shape[dim], steps):
            high = min(low + steps, shape[dim])
            end = [*(at + 1 for at in outer), high, *shape[dim + 1 :]]
            yield Box((*outer, low, *begin[dim + 1 :]), tuple(end))


Plan = TypeVar("Plan", bound=ReadPlan)


class Replica:
    """One of several sets of ranks that each hold all tensors, named by any rank of it.

    The holders of a part are numbered by rank. The replica of a rank takes every other part from
    the holder of the same number: as ranks are numbered along meshes, those are the ranks that
    differ from it along sharded axes only.
    """

    def __init__(self, layout: Layout, rank: int = 0) -> None:
        if not 0 <= rank < layout.world_size:
            raise UsageError(f"replica: {rank}; expected a rank from 0 to {layout.world_size - 1}")
        self.rank = rank
        self.world_size = layout.world_size
        self._places: dict[int, int] = {}
        """By the number of holders, for tensors of which the rank has no part."""
        if rank == 0:
            return
        for tensor in layout.tensors:
            place, count = self._place(holders_of(tensor.pieces))
            if place is not None:
                self._places.setdefault(count, place)

    def pieces(self, tensor: TensorLayout) -> list[Piece]:
        """One piece for every region that is not empty."""
        if len(tensor.pieces) == 1:
            return [piece for piece in tensor.pieces if piece.region.numel]
        holders = holders_of(tensor.pieces)
        if not self.rank or all(len(one) == 1 for one in holders):
            return [one[0] for one in holders]
        place, _ = self._place(holders)
        return [
            one[min(place if place is not None else self._places.get(len(one), 0), len(one) - 1)]
            for one in holders
        ]

    def _place(self, holders: Iterable[Sequence[Piece]]) -> tuple[int | None, int]:
        for pieces in holders:
            for place, piece in enumerate(pieces):
                if piece.rank == self.rank:
                    return place, len(pieces)
        return None, 0


def holders_of(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """The pieces of each region that is not empty, by rank."""
    found: dict[Region, list[Piece]] = {}
    for piece in pieces:
        if piece.region.numel:
            found.setdefault(piece.region, []).append(piece)
    for one in found.values():
        one.sort(key=lambda piece: piece.rank)
    return list(found.values())


def plan_read(
    layout: Layout,
    selection: Iterable[SelectedTensor],
    *,
    costs: Costs | None = None,
    replica: int | None = None,
    others: Mapping[str, int] | None = None,
) -> ReadPlan:
    """Plan to read each element of `selection` once, from one replica.

    `costs`: which ranks to avoid, only without `replica`, a rank of the one to read; `others`: with
    `replica`, those of tensors that only another has, by fqn.

    Raises:
        UsageError: If there is no such rank.
        UnreachableError: If every replica needs a rank that costs infinity.
    """
    items = list(selection)
    if replica is not None:
        others = others if others is not None else {}
        own = Replica(layout, replica)
        made = {rank: Replica(layout, rank) for rank in {*others.values()}}
        return _plan(items, own, {fqn: made[rank] for fqn, rank in others.items()})
    return cheapest(layout, partial(_plan, items), costs)


def cheapest(layout: Layout, plan: Callable[[Replica], Plan], costs: Costs | None) -> Plan:
    """The plan of the replica that costs least.

    Raises:
        UnreachableError: As `plan_read`.
    """
    found = plan(Replica(layout))
    least = _cost(found, costs)
    for rank in range(1, layout.world_size):
        if not least:
            break
        other = plan(Replica(layout, rank))
        cost = _cost(other, costs)
        if cost < least:
            found, least = other, cost
    if math.isinf(least):
        gone = [read.rank for read in found.ranks if math.isinf((costs or {}).get(read.rank, 0))]
        raise UnreachableError(
            f"no replica is whole without ranks that are not available, {gone} among them; "
            "`paramd status` shows the state of the ranks"
        )
    return found


def _cost(plan: ReadPlan, costs: Costs | None) -> float:
    return sum(costs.get(read.rank, 0.0) for read in plan.ranks) if costs else 0.0


def _plan(
    selection: Sequence[SelectedTensor],
    replica: Replica,
    others: Mapping[str, Replica] | None = None,
) -> ReadPlan:
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
        for piece in (others or {}).get(tensor.fqn, replica).pieces(tensor):
            for view in views_of(piece.region, piece.strides, tensor.shape, item.box, size):
                begin_bytes = piece.arena_begin + view.begin_bytes
                reads.setdefault(piece.rank, []).append((begin_bytes, number, view))
    return ReadPlan(
        tensors=tuple(tensors),
        ranks=tuple(_rank_read(rank, reads[rank]) for rank in sorted(reads)),
        replica=replica.rank,
    )


_Found: TypeAlias = tuple[int, int, Landing]
"""First byte in the arena, index of the tensor, and the view."""


def _rank_read(rank: int, found: list[_Found]) -> RankRead:
    found.sort(key=itemgetter(0, 1))
    spans = joined(((begin, begin + view.size_bytes) for begin, _, view in found), MAX_GAP_BYTES)
    offset = offsets_in(spans)
    return RankRead(
        rank=rank,
        spans=tuple(spans),
        size_bytes=sum(end - begin for begin, end in spans),
        landings=tuple(
            replace(view, tensor=number, begin_bytes=offset(begin)) for begin, number, view in found
        ),
    )
