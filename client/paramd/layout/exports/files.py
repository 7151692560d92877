"""Files and entries of an export, the interface of a format, and the bytes it chooses. Pure.

All regions are read from one replica; a source names the spans to pin.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paramd.errors import UsageError
from paramd.layout.dtypes import DTYPES, item_bytes
from paramd.layout.plan import MAX_GAP_BYTES
from paramd.layout.types import (
    Box,
    Piece,
    Region,
    TensorLayout,
    cover_numel,
    joined,
    offsets_in,
    row_major,
)

if TYPE_CHECKING:
    from paramd.layout.exports.dcp import TorchArchive
    from paramd.layout.exports.extra import Constant
    from paramd.layout.exports.optimizer import OptimizerTable, StateScalar
    from paramd.layout.exports.plan import ExportPlan
    from paramd.layout.exports.settings import ExportSettings
    from paramd.layout.exports.views import Averages


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
    """One tensor, with every element present once."""

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
    offsets = {rank: offsets_in(spans[rank]) for rank in spans}
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


class ExportState(StrEnum):
    """State of an export; the last three are terminal."""

    PLANNED = "PLANNED"
    RUNNING = "RUNNING"
    VERIFYING = "VERIFYING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


EXPORT_ENDS = frozenset({ExportState.DONE, ExportState.FAILED, ExportState.CANCELLED})


class BlendKind(StrEnum):
    """How a tensor is computed of what is read, with torch's own functions."""

    LOW_RANK = "low_rank"
    """tensor + weight * B A; the inputs are A and B."""
    ADD = "add"
    """tensor + weight * input."""
    LERP = "lerp"
    """torch.lerp(tensor, input, weight)."""


@dataclass(frozen=True, slots=True)
class Blend:
    """What is computed of a tensor, and of others beside it, as it is written."""

    kind: BlendKind
    inputs: tuple[tuple[str, int], ...]
    """The others: state key, and index into that source's tensors."""
    weight: float
    transposed: bool = False
    """LOW_RANK: the tensor is of shape (in, out)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or a box of one, in a file."""

    name: str
    """Name in the files."""
    state_key: str
    """Key of the source it is read from."""
    tensor: int
    """Index into that source's tensors; -1 for a constant."""
    box: Box
    """The part of the tensor."""
    dtype: str
    """Dtype in the file."""
    begin_bytes: int
    """Offset in the file: of the data, or of the frame around it."""
    constant: bytes | None = None
    """The data, if not read from a tensor."""
    blend: Blend | None = None
    """None: the tensor as it is."""

    @property
    def data_bytes(self) -> int:
        if self.constant is not None:
            return len(self.constant)
        return self.box.numel * item_bytes(self.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file, frame included."""
        return self.frame.size_bytes if self.frame is not None else self.data_bytes

    @property
    def frame(self) -> TorchArchive | None:
        """The bytes around the data; None in formats without any."""
        return None


@dataclass(frozen=True)
class ExportFile:
    """One file: its header, then its entries without gaps."""

    name: str
    rank: int
    """The rank that should write it."""
    header: bytes
    entries: tuple[Entry, ...]

    @cached_property
    def size_bytes(self) -> int:
        return len(self.header) + sum(entry.size_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Reads:
    """The pieces that are read of each tensor, by fqn."""

    world_size: int
    model: Mapping[str, Sequence[Piece]]
    states: Mapping[str, Sequence[Piece]]
    """The parameter's optimizer state, which another replica may hold."""
    constants: Mapping[str, Constant] = field(default_factory=dict)
    """Tensors of extra state."""
    unwritten: Collection[str] = ()
    """Tensors that are only read, for others."""
    averages: Averages | None = None
    """Where the weights are, if they are not the parameters."""
    blends: Mapping[str, Blend] = field(default_factory=dict)
    """What is computed of a tensor."""

    def source(
        self, fqn: str, number: int, states: Mapping[tuple[str, str], int]
    ) -> tuple[str, int]:
        """State key and index of what is written as that tensor, the `number`-th of the model's.

        `states`: as of `state_positions`.
        """
        key = self.averages.sources.get(fqn, "") if self.averages is not None else ""
        return (key, states[key, fqn]) if key else ("", number)


Names = Mapping[str, str]

PlanFiles = Callable[
    [Sequence[TensorLayout], Names, "ExportSettings", Reads, "OptimizerTable | None"],
    list[ExportFile],
]
"""(tensors, their names in the files, settings, what is read, optimizer) -> files."""

TorchFiles = Callable[[Mapping[str, Any]], dict[str, bytes]]
"""(description in JSON types) -> files written by torch, by name; blocks for seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A file format: `plan` lays out files and entries, `Entry.frame` adds bytes around the data,
    `finish` makes the small files beside them once all are written.
    """

    name: str
    """Name in the CLI, REST and manifests."""
    number: int
    """Number in paramd.v1.ExportFormat."""
    endings: tuple[str, ...]
    """File name endings reserved for this format."""
    plan: PlanFiles
    """Runs on every side that needs the plan, so it must be deterministic."""
    finish: Callable[[ExportPlan, TorchFiles], dict[str, bytes]]
    """Small files by name. Runs on one sidecar, off its event loop."""
    keeps_tied: bool = False
    """Tied tensors always keep all their names, which share the bytes."""


def state_positions(
    tensors: Sequence[TensorLayout], optimizer: OptimizerTable
) -> dict[tuple[str, str], int]:
    """Index of each (state key, fqn) among the tensors of that key's source."""
    known = {tensor.fqn for tensor in tensors}
    return {
        (key, fqn): number
        for key in optimizer.keys
        for number, fqn in enumerate(f for f, _ in optimizer.tensors(key) if f in known)
    }


def scalar_bytes(scalar: StateScalar) -> bytes:
    """The bytes of a 0-dim state; UsageError if `struct` has no format for its dtype."""
    return number_bytes(scalar.value, scalar.dtype, f"state {scalar.key!r}")


def number_bytes(value: float, dtype: str, name: str) -> bytes:
    """The bytes of a number; UsageError if `struct` has no format for its dtype."""
    form = DTYPES[dtype].form
    if not form:
        raise UsageError(f"{name}: 0-dim {dtype} cannot be written")
    return struct.pack(f"<{form}", value if form in "def" else int(value))


def json_bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
