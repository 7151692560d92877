"""Snapshot memory: memfds that are mapped and prefaulted before they are needed.

A fresh page costs ten times a warm copy, and the trainer may be waiting while a copy
runs. So blocks are made off the event loop, ahead of the copy, and reused.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from paramd.errors import ExhaustedError
from paramd.memory import descriptors
from paramd.memory.arena import HostArena
from paramd.memory.gate import CopySpan
from paramd.memory.gradient_program import Notes


def block_bytes(size_bytes: int) -> int:
    """Size of a block for `size_bytes`: whole pages."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Block:
    """A memfd; `buffer` and `address` are its mapping in this process."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = block_bytes(size_bytes)
        self.descriptor = descriptors.create_memory("paramd-snapshot", self.size_bytes)
        try:
            self._arena = HostArena(self.descriptor, self.size_bytes)
            self._arena.populate()
        except BaseException:
            os.close(self.descriptor)
            raise
        self.buffer = self._arena.buffer
        self.address = self._arena.address

    def close(self) -> None:
        """Unmap it here and close the descriptor; other processes' mappings live on."""
        self.buffer = memoryview(b"")
        self._arena.close()
        os.close(self.descriptor)


class BlockMaker(Protocol):
    """Makes and frees blocks."""

    def make(self, size_bytes: int) -> Block:
        """Make a prefaulted block. Slow: call off the event loop. Raises ExhaustedError."""

    def dispose(self, block: Block) -> None:
        """Free a block, later and on another thread: unmapping a gigabyte takes 50 ms."""


class MemfdBlocks:
    """The production maker; frees on the executor that also makes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def make(self, size_bytes: int) -> Block:
        try:
            return Block(size_bytes)
        except OSError as error:
            raise ExhaustedError(
                f"no memory for a snapshot of {size_bytes:,} bytes ({error.strerror}); "
                "ask for less, or wait until other snapshots are released"
            ) from error

    def dispose(self, block: Block) -> None:
        self._executor.submit(block.close)


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
    """Together with `step`, names the state of the bytes."""
    iteration: int = -1
    unsettled: bool = False
    """As in `paramd.v1.Header`."""
    proof: int = 0
    """What proved the copy, as in `memory.gate.State`; 0 if made at an agreed boundary."""
    holders: int = 0
    """Leases, waiting requests, running copies and reductions."""
    map_count: int = 0
    """Clients that currently map the memory."""
    tainted: bool = False
    """A client left without reporting its unmap: never reuse the memory."""
    notes: Notes | None = None
    """For gradients: what the bytes do not say."""

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
    who: str | None = None
    """The token that holds it; None: the control plane or the owner."""


def copy_spans(snapshot: Snapshot, arena_address: int) -> list[CopySpan]:
    """Spans to copy to fill a snapshot; its block must exist."""
    if snapshot.block is None:
        return []
    target = snapshot.block.address
    spans = []
    for begin, end in snapshot.key.spans:
        spans.append(CopySpan(arena_address + begin, target, end - begin))
        target += end - begin
    return spans
