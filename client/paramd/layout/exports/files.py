"""What an export consists of in any format, and what a format says of itself. Pure."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from paramd.errors import UsageError
from paramd.layout.dtypes import DTYPES, item_bytes
from paramd.layout.exports.optimizer import OptimizerTable, StateScalar
from paramd.layout.types import Box, Piece, TensorLayout

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan
    from paramd.layout.exports.settings import ExportSettings


class Frame(Protocol):
    """Bytes before and after the data of one entry."""

    before: bytes

    @property
    def size_bytes(self) -> int:
        """With the data."""

    def after(self, checksum: int) -> bytes:
        """What follows the data; `checksum` is the data's zlib.crc32."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or a box of one, in a file."""

    name: str
    """In the files."""
    state_key: str
    """Which source it is read from."""
    tensor: int
    """Index into that source's tensors; -1 for a constant."""
    box: Box
    """The part of the tensor."""
    dtype: str
    """In the file."""
    begin_bytes: int
    """First byte within the file: of the data, or of the frame around it."""
    constant: bytes | None = None
    """The data, when they are no tensor's."""

    @property
    def data_bytes(self) -> int:
        """Bytes of the data alone."""
        if self.constant is not None:
            return len(self.constant)
        return self.box.numel * item_bytes(self.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes within the file."""
        return self.frame.size_bytes if self.frame is not None else self.data_bytes

    @property
    def frame(self) -> Frame | None:
        """What stands around the data."""
        return None


@dataclass(frozen=True)
class ExportFile:
    """One file: its header, then its entries without gaps."""

    name: str
    rank: int
    """Who should write it."""
    header: bytes
    entries: tuple[Entry, ...]

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(entry.size_bytes for entry in self.entries)


Names = Mapping[str, str]
Planned = tuple[list[ExportFile], dict[str, Sequence[Piece]]]
"""Files, and by tensor the pieces that are read."""


PlanFiles = Callable[
    [Sequence[TensorLayout], Names, "ExportSettings", Sequence[int], OptimizerTable | None], Planned
]
"""(tensors, their names in the files, settings, ranks that may write, optimizer)."""

TorchFiles = Callable[[Mapping[str, Any]], dict[str, bytes]]
"""From a description in JSON's types to the files that torch makes of it; blocks for seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How files are laid out: `plan` gives them and their entries, `Entry.frame` what is filled
    in around data, `finish` what comes beside once all are written."""

    name: str
    """In the CLI, REST and manifests."""
    number: int
    """Of paramd.v1.ExportFormat."""
    endings: tuple[str, ...]
    """Ends of names that only the format gives."""
    plan: PlanFiles
    """Wherever a plan is needed; equal on all sides."""
    finish: Callable[[ExportPlan, TorchFiles], dict[str, bytes]]
    """On one sidecar, off its event loop; small files by name."""
    keeps_tied: bool = False
    """Tied tensors always have all their names, which share the bytes."""


def state_positions(
    tensors: Sequence[TensorLayout], optimizer: OptimizerTable
) -> dict[tuple[str, str], int]:
    """Index of each (key, name) among the tensors of that key's source."""
    known = {tensor.fqn for tensor in tensors}
    return {
        (key, fqn): number
        for key in optimizer.keys
        for number, fqn in enumerate(f for f, _ in optimizer.tensors(key) if f in known)
    }


def scalar_bytes(scalar: StateScalar) -> bytes:
    """The bytes of a 0-dim state.

    Raises:
        UsageError: its dtype has no plain form.
    """
    form = DTYPES[scalar.dtype].form
    if not form:
        raise UsageError(f"state {scalar.key!r}: 0-dim {scalar.dtype} cannot be written")
    return struct.pack(f"<{form}", scalar.value if form in "def" else int(scalar.value))


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """A small file of JSON."""
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
