"""Choose the bytes of an export: one holder for every region, and the spans to pin. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paramd.layout.dtypes import item_bytes
from paramd.layout.plan import MAX_GAP_BYTES
from paramd.layout.types import Box, Piece, Region, TensorLayout, cover_numel, joined, row_major


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """One region in one rank's snapshot."""

    rank: int
    begin_bytes: int
    """Offset of its first element within the snapshot."""
    region: Region
    strides: tuple[int, ...] | None
    """As `Piece.strides`."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor, each of its elements held once."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[HeldPiece, ...]
    """Ordered by rank; none if the tensor is empty."""


@dataclass(frozen=True, slots=True)
class Source:
    """Snapshots of one kind of state, on all ranks that hold some of it."""

    state_key: str
    """Optimizer state such as "exp_avg"; empty for parameters and buffers."""
    tensors: tuple[SourceTensor, ...]
    spans: Mapping[int, tuple[tuple[int, int], ...]]
    """Half-open arena spans to pin, by rank."""


def piece_bytes(piece: Piece, dtype: str) -> int:
    """Bytes of the arena from a piece's first to its last element."""
    region = piece.region
    if isinstance(region, Box):
        strides = piece.strides if piece.strides is not None else row_major(region.sizes)
        return cover_numel(region.sizes, strides) * item_bytes(dtype)
    return region.numel * item_bytes(dtype)


@dataclass(slots=True)
class HolderChoice:
    """Chooses one holder of each region: the writer if it is one, else the least loaded."""

    _loads: dict[int, int] = field(default_factory=dict)

    def pieces(self, tensor: TensorLayout, writer: int | None) -> list[Piece]:
        """One piece for every non-empty region."""
        holders: dict[Region, list[Piece]] = {}
        for piece in tensor.pieces:
            if piece.region.numel:
                holders.setdefault(piece.region, []).append(piece)
        return [self._one(pieces, tensor.dtype, writer) for pieces in holders.values()]

    def _one(self, pieces: Sequence[Piece], dtype: str, writer: int | None) -> Piece:
        def cost(piece: Piece) -> tuple[bool, int, int]:
            return piece.rank != writer, self._loads.get(piece.rank, 0), piece.rank

        chosen = min(pieces, key=cost) if len(pieces) > 1 else pieces[0]
        load = self._loads.get(chosen.rank, 0)
        self._loads[chosen.rank] = load + piece_bytes(chosen, dtype)
        return chosen


def make_source(
    state_key: str, chosen: Iterable[tuple[TensorLayout, str, Sequence[Piece]]]
) -> Source:
    """A source from (tensor, dtype of its bytes, chosen pieces), in this order."""
    items = list(chosen)
    wanted: dict[int, list[tuple[int, int]]] = {}
    for _, dtype, pieces in items:
        for piece in pieces:
            begin = piece.arena_begin
            wanted.setdefault(piece.rank, []).append((begin, begin + piece_bytes(piece, dtype)))
    spans = {rank: tuple(joined(wanted[rank], MAX_GAP_BYTES)) for rank in sorted(wanted)}
    offsets = {rank: _offsets(spans[rank]) for rank in spans}
    tensors = tuple(
        SourceTensor(
            tensor.fqn,
            dtype,
            tensor.shape,
            tuple(
                HeldPiece(p.rank, offsets[p.rank](p.arena_begin), p.region, p.strides)
                for p in sorted(pieces, key=lambda piece: piece.rank)
            ),
        )
        for tensor, dtype, pieces in items
    )
    return Source(state_key, tensors, spans)


def _offsets(spans: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """A function from an arena offset to the offset in the snapshot of `spans`, in bytes."""
    begins = [begin for begin, _ in spans]
    before = [0]
    for begin, end in spans:
        before.append(before[-1] + end - begin)

    def offset(arena_begin: int) -> int:
        at = bisect_right(begins, arena_begin) - 1
        return before[at] + arena_begin - begins[at]

    return offset
