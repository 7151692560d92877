"""Replicas: what several ranks hold alike, and samples that show whether it is the same there.

A training's replicas need not be equal: buffers, local SGD, parameters left out of DDP. That shows
in nearly every element, so a few places of each piece tell it; a flipped bit is found by the alerts
(`replica-drift`), which compare everything in turn.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from paramd.layout.dtypes import item_bytes
from paramd.layout.types import Region, TensorLayout, joined, offsets_in

SAMPLE_BYTES = 4 << 20
"""Most bytes of one rank that are sampled, but for 64 of each piece."""
MOST_COMPARED = 8
"""Most ranks that are compared."""

_PLACES, _PIECE_BYTES = 4, 4096


def shared_pieces(tensor: TensorLayout) -> list[tuple[Region, dict[int, int]]]:
    """The parts that several ranks hold, elements in the same order: region, and first byte in the
    arena of each holder."""
    if len(tensor.pieces) < 2:
        return []
    holders: dict[tuple[Region, tuple[int, ...] | None], dict[int, int]] = {}
    for piece in tensor.pieces:
        if piece.region.numel:
            holders.setdefault((piece.region, piece.strides), {})[piece.rank] = piece.arena_begin
    return [(region, begins) for (region, _), begins in holders.items() if len(begins) > 1]


@dataclass(frozen=True, slots=True)
class Sample:
    """A few places of a piece that several ranks hold."""

    fqn: str
    places: tuple[tuple[int, int], ...]
    """Half-open byte ranges within the piece, in order."""
    begins: Mapping[int, int]
    """First byte of the piece in the arena, by rank; two ranks or more."""


def samples_of(
    tensors: Iterable[TensorLayout], ranks: Container[int], turn: int = 0
) -> list[Sample]:
    """What of these tensors can be compared between at most `MOST_COMPARED` of `ranks`.

    Where there are more, those of each turn are others.
    """
    found = [(tensor, *part) for tensor in tensors for part in shared_pieces(tensor)]
    asked: set[int] = set()
    for _, _, begins in found:
        if len(asked) == MOST_COMPARED:
            break
        new = [rank for rank in begins if rank in ranks and rank not in asked]
        begin = turn % max(len(new), 1)
        asked.update((new[begin:] + new[:begin])[: MOST_COMPARED - len(asked)])
    most = max(64, min(_PIECE_BYTES, SAMPLE_BYTES // max(len(found), 1)))
    samples = (
        Sample(
            tensor.fqn,
            _places(region.numel * item_bytes(tensor.dtype), most),
            {rank: begin for rank, begin in begins.items() if rank in asked},
        )
        for tensor, region, begins in found
    )
    return [one for one in samples if len(one.begins) > 1]


@cache
def _places(size_bytes: int, most_bytes: int) -> tuple[tuple[int, int], ...]:
    if size_bytes <= most_bytes:
        return ((0, size_bytes),)
    each = most_bytes // _PLACES
    begins = (n * (size_bytes - each) // (_PLACES - 1) for n in range(_PLACES))
    return tuple((begin, begin + each) for begin in begins)


def places_on(samples: Iterable[Sample], rank: int) -> list[tuple[int, int]]:
    return [
        (one.begins[rank] + begin, one.begins[rank] + end)
        for one in samples
        if rank in one.begins
        for begin, end in one.places
    ]


def sample_spans(samples: Sequence[Sample]) -> dict[int, list[tuple[int, int]]]:
    """What to read of each rank for samples."""
    ranks = {rank for one in samples for rank in one.begins}
    return {rank: joined(places_on(samples, rank), 0) for rank in sorted(ranks)}


def ranges_in(
    samples: Iterable[Sample], rank: int, spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The `places_on` a rank, within its spans one after the other."""
    offset_of = offsets_in(spans)
    return [(offset_of(b), offset_of(b) + e - b) for b, e in places_on(samples, rank)]


def differing(samples: Iterable[Sample], seen: Mapping[int, Sequence[bytes]]) -> tuple[str, ...]:
    """The tensors of which not all ranks hold the same; `seen` has the bytes, or a digest, of each
    of the `places_on` them."""
    left = {rank: iter(digests) for rank, digests in seen.items()}
    found: dict[str, None] = {}
    for one in samples:
        for _ in one.places:
            if len({next(left[rank]) for rank in one.begins if rank in left}) > 1:
                found[one.fqn] = None
    return tuple(found)
