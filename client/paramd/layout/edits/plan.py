"""Plan an edit: from its operations to the views of each rank's arena that change.

Every holder of a region changes, replicas included. A rank's *data* are the operand elements it
needs: item after item, each dense and row-major, starting at a multiple of
`DATA_ALIGNMENT_BYTES`; the padding is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from paramd.errors import NotFoundError, UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.edits.ops import WHOLE_BOX, check_op
from paramd.layout.merge import outside, overlaps
from paramd.layout.plan import Landing, views_of
from paramd.layout.types import (
    Box,
    Interval,
    Layout,
    Piece,
    TensorKind,
    TensorLayout,
    cover_numel,
    full_box,
    intersection,
    row_major,
)
from paramd.v1 import sidecar_pb2 as pb

MAX_OPS = 100_000
"""Most operations in one edit."""

MAX_REGIONS = 1_000
"""Most regions of one parameter in one edit."""

DATA_ALIGNMENT_BYTES = 64

Find = Callable[[str], TensorLayout | None]
"""The tensor of a name, aliases included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditItem:
    """A strided view of a rank's arena, and the source of its operand's elements."""

    op: int
    """Index of its operation."""
    arena_begin: int
    """Offset in bytes of the view's first element in the arena."""
    dtype: str
    """torch dtype without its prefix."""
    sizes: tuple[int, ...]
    """Elements in each dim of the view; never 0."""
    strides: tuple[int, ...]
    """Element strides in the arena."""
    data_begin: int
    """Offset in bytes of its elements in the rank's data; -1 if the operation has no data."""
    source_begin: int
    """First element in the operation's operand, a row-major tensor of the region's shape."""
    source_strides: tuple[int, ...]
    """Element strides in the operand."""

    @property
    def size_bytes(self) -> int:
        return prod(self.sizes) * item_bytes(self.dtype)

    @property
    def arena_end(self) -> int:
        """Offset in bytes of the end of its last element in the arena."""
        return self.arena_begin + cover_numel(self.sizes, self.strides) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEdit:
    rank: int
    items: tuple[EditItem, ...]
    """In the order of the operations. Views of one edit never overlap."""
    data_bytes: int
    """Length of the rank's data, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """An operation, and the parameter it changes."""

    op: pb.EditOp
    tensor: TensorLayout
    box: Box
    """The region, in coordinates of the whole parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditPlan:
    ops: tuple[PlannedOp, ...]
    ranks: tuple[RankEdit, ...]
    """Ordered by rank, ranks without items included: all take part in the boundary."""

    @property
    def numel(self) -> int:
        """Elements of the model that change, replicas counted once."""
        return sum(planned.box.numel for planned in self.ops)


def plan_edit(
    layout: Layout,
    ops: Sequence[pb.EditOp],
    *,
    ranks: Iterable[int] | None = None,
    allow_nonfinite: bool = False,
) -> EditPlan:
    """Plan an edit for all ranks, or for `ranks`.

    Raises:
        UsageError: If an operation does not fit its parameter or names a buffer, regions
            overlap, or a limit of this module is exceeded.
        NotFoundError: If no parameter has that name.
    """
    planned = check_ops(finder(layout), ops, allow_nonfinite=allow_nonfinite)
    wanted = range(layout.world_size) if ranks is None else sorted(ranks)
    return EditPlan(ops=planned, ranks=rank_edits(planned, wanted))


def finder(layout: Layout) -> Find:
    """A lookup of a layout's tensors by any of their names."""
    return {name: one for one in layout.tensors for name in (one.fqn, *one.aliases)}.get


def check_ops(
    find: Find, ops: Sequence[pb.EditOp], *, allow_nonfinite: bool = False
) -> tuple[PlannedOp, ...]:
    """Check operations, and find the tensor and region of each. Raises as `plan_edit`."""
    if not 0 < len(ops) <= MAX_OPS:
        raise UsageError(f"ops: {len(ops):,} operations; expected 1 to {MAX_OPS:,}")
    planned = tuple(_planned(find, op, allow_nonfinite) for op in ops)
    by_tensor: dict[str, list[Box]] = {}
    for one in planned:
        by_tensor.setdefault(one.tensor.fqn, []).append(one.box)
    for fqn, boxes in by_tensor.items():
        _check_disjoint(fqn, boxes)
    _check_memory({one.tensor.fqn: one.tensor for one in planned}.values())
    return planned


def rank_edits(planned: Sequence[PlannedOp], ranks: Iterable[int]) -> tuple[RankEdit, ...]:
    held: dict[int, list[tuple[int, PlannedOp, Piece]]] = {rank: [] for rank in ranks}
    for number, one in enumerate(planned):
        for piece in one.tensor.pieces:
            if piece.rank in held:
                held[piece.rank].append((number, one, piece))
    return tuple(_rank_edit(rank, found) for rank, found in held.items())


def overlap(ops: Iterable[PlannedOp], others: Iterable[PlannedOp]) -> str | None:
    """The fqn of a parameter with an element that both change; None if there is none."""
    boxes: dict[str, list[Box]] = {}
    for one in ops:
        boxes.setdefault(one.tensor.fqn, []).append(one.box)
    for other in others:
        for box in boxes.get(other.tensor.fqn, ()):
            if intersection(box, other.box) is not None:
                return other.tensor.fqn
    return None


def _planned(find: Find, op: pb.EditOp, allow_nonfinite: bool) -> PlannedOp:
    tensor = find(op.fqn)
    if tensor is None:
        raise NotFoundError(
            f"there is no parameter {op.fqn[:200]!r} in this layout; `paramd params` lists them"
        )
    if tensor.kind is TensorKind.BUFFER:
        raise UsageError(
            f"{op.fqn!r} is a buffer, which is in the trainer's own memory; only parameters can "
            "be edited"
        )
    box = Box(tuple(op.begin), tuple(op.end))
    box = full_box(tensor.shape) if box == WHOLE_BOX else box
    if reason := outside(box, tensor.shape):
        raise UsageError(
            f"a region of {op.fqn!r} is out of range: {reason}; expected bounds in order within "
            f"shape {list(tensor.shape)}"
        )
    check_op(op, tensor.dtype, allow_nonfinite=allow_nonfinite)
    return PlannedOp(op=op, tensor=tensor, box=box)


def _check_disjoint(fqn: str, boxes: list[Box]) -> None:
    boxes = [box for box in boxes if box.numel]
    if len(boxes) < 2:
        return
    if len(boxes) > MAX_REGIONS:
        raise UsageError(
            f"{len(boxes):,} operations change {fqn!r}; expected at most {MAX_REGIONS:,} regions "
            "of one parameter; use larger ones"
        )
    if next(iter(overlaps(boxes, len(boxes[0].begin))), None) is not None:
        raise UsageError(
            f"two operations change the same elements of {fqn!r}; an edit may change each "
            "element only once, so make two edits"
        )


def _check_memory(tensors: Iterable[TensorLayout]) -> None:
    """Reject tensors that share memory without being tied."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for tensor in tensors:
        size = item_bytes(tensor.dtype)
        for piece in tensor.pieces:
            end = piece.arena_begin + piece.region.numel * size
            if end > piece.arena_begin:
                spans.setdefault(piece.rank, []).append((piece.arena_begin, end, tensor.fqn))
    for found in spans.values():
        found.sort()
        for one, other in pairwise(found):
            if other[0] < one[1] and one[2] != other[2]:
                raise UsageError(
                    f"{one[2]!r} and {other[2]!r} share memory; edit one of them at a time"
                )


def _rank_edit(rank: int, held: Iterable[tuple[int, PlannedOp, Piece]]) -> RankEdit:
    items: list[EditItem] = []
    data_bytes = 0
    for number, planned, piece in held:
        tensor, size = planned.tensor, item_bytes(planned.tensor.dtype)
        for view in views_of(piece.region, piece.strides, tensor.shape, planned.box, size):
            begin, strides = _source(view, planned.box)
            item = EditItem(
                op=number,
                arena_begin=piece.arena_begin + view.begin_bytes,
                dtype=tensor.dtype,
                sizes=view.sizes,
                strides=view.strides,
                data_begin=data_bytes if planned.op.with_data else -1,
                source_begin=begin,
                source_strides=strides,
            )
            items.append(item)
            if planned.op.with_data:
                end = data_bytes + item.size_bytes
                data_bytes = -(-end // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES
    return RankEdit(rank=rank, items=tuple(items), data_bytes=data_bytes)


def _source(view: Landing, wanted: Box) -> tuple[int, tuple[int, ...]]:
    """First element and strides of a view in a row-major tensor of the wanted shape."""
    if isinstance(view.target, Interval):
        return view.target.begin, (1,)
    strides = row_major(wanted.sizes)
    return sum(b * stride for b, stride in zip(view.target.begin, strides, strict=True)), strides
