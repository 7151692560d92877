"""Memory of snapshots: memfds that are mapped and faulted in before anybody needs them.

A fresh page costs ten times a warm copy, and the trainer may be waiting while a copy
runs. So blocks are made off the event loop, ahead of the copy, and used again.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Executor
from typing import Protocol

from paramd.errors import ExhaustedError
from paramd.memory import descriptors
from paramd.memory.arena import HostArena


def block_bytes(size_bytes: int) -> int:
    """What a block for `size_bytes` takes: whole pages."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Block:
    """Memory with a descriptor; `buffer` and `address` are its map in this process."""

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
        """Unmaps it here and drops the descriptor; other processes' maps live on."""
        self.buffer = memoryview(b"")
        self._arena.close()
        os.close(self.descriptor)


class BlockMaker(Protocol):
    """Makes blocks and lets go of them."""

    def make(self, size_bytes: int) -> Block:
        """A faulted-in block. Slow: off the event loop. Raises ExhaustedError."""

    def dispose(self, block: Block) -> None:
        """Frees a block, later and elsewhere: unmapping a gigabyte takes 50 ms."""


class MemfdBlocks:
    """The real maker; disposes on the executor that also makes."""

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
