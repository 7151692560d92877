"""A snapshot, its key and a lease on it: the words of the snapshot store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paramd.memory.gate import CopySpan
from paramd.memory.gradient_program import Notes
from paramd_service.sidecar.blocks import Block


@dataclass(frozen=True, slots=True)
class Key:
    """What a snapshot holds; equal keys at one step mean equal bytes."""

    epoch: int
    spans: tuple[tuple[int, int], ...]
    """Half-open byte spans of the arena, sorted, not overlapping."""
    source: int = 0
    """A `paramd.v1.Source`: what they are bytes of."""
    state_key: str = ""
    """Which optimizer state."""

    @property
    def size_bytes(self) -> int:
        return sum(end - begin for begin, end in self.spans)


class Fill(Enum):
    """Whether the bytes are there."""

    EMPTY = "prepared, not filled"
    PENDING = "being filled"
    FILLED = "filled"


@dataclass(eq=False, slots=True)
class Snapshot:
    """Bytes of one step, shared by the leases on them."""

    key: Key
    at_boundary: bool
    with_buffers: bool = False
    block: Block | None = None
    fill: Fill = Fill.EMPTY
    step: int = -1
    edits: int = -1
    """With `step` it names the state that the bytes are of."""
    holders: int = 0
    """Leases, waiting requests, running copies and reductions."""
    map_count: int = 0
    """Clients that map the memory now."""
    tainted: bool = False
    """A client went away without saying that it unmapped: never use the memory again."""
    notes: Notes | None = None
    """Of gradients: what their bytes do not tell."""

    @property
    def size_bytes(self) -> int:
        return self.key.size_bytes

    @property
    def shareable(self) -> bool:
        return self.fill is Fill.FILLED and not self.at_boundary and not self.tainted

    def view(self) -> memoryview:
        """The bytes, in this process."""
        return self.block.buffer[: self.size_bytes] if self.block is not None else memoryview(b"")


@dataclass(eq=False, slots=True)
class Lease:
    """One holder's right to a snapshot until `expires_ns`."""

    snapshot_id: str
    snapshot: Snapshot
    expires_ns: int


def copy_spans(snapshot: Snapshot, arena_address: int) -> list[CopySpan]:
    """What has to be copied to fill it; its block must be there."""
    if snapshot.block is None:
        return []
    target = snapshot.block.address
    spans = []
    for begin, end in snapshot.key.spans:
        spans.append(CopySpan(arena_address + begin, target, end - begin))
        target += end - begin
    return spans
