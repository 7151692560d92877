"""The words of the layout: regions, pieces, tensors. Pure data, no I/O, no torch.

Every range is half-open. Offsets named `*_begin` in a `Piece` count bytes of an
arena; those in a region count elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TypeAlias


class TensorKind(Enum):
    """Whether a tensor is constant between updates (parameter) or not (buffer)."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open N-d box `[begin, end)` of a full tensor; 0-dim when both are empty."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(e - b for b, e in zip(self.begin, self.end, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Interval:
    """A half-open interval `[begin, end)` in elements of a row-major flattened tensor."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


Region: TypeAlias = Box | Interval


@dataclass(frozen=True, slots=True)
class Piece:
    """One region held by one rank.

    `strides` are element strides of a box whose memory is dense but not row-major
    (channels-last weights, transposed parameters); None means row-major.
    """

    rank: int
    arena_begin: int
    region: Region
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One full parameter or buffer. `pieces` name every holder, replicas included."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    kind: TensorKind
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()
    placement: str = "replicated"

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of all ranks. `arena_bytes[r]` is the size of rank r's arena."""

    world_size: int
    arena_bytes: tuple[int, ...]
    tensors: tuple[TensorLayout, ...]
    mirrored: bool = False
    """The parameters stay in the trainers' own memory; arenas are copies, made at agreed
    boundaries that ask for them. So nothing is read but at such a boundary."""
