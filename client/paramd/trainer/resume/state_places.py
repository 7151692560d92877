"""Memory for optimizer state, handed out in places that its tensors keep.

A place is a number: the byte in the optimizer memory; for state on a device, DEVICE_PLACES and the
byte in its memory there (memory/optimizer_state.py). The place of a tensor that is gone is taken
again by one of the same size.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import torch

from paramd.memory.arena import private_in_children
from paramd.memory.descriptors import SparseMemory, pages
from paramd.trainer.home.moving import Memory, bytes_at


class StateMemory(Protocol):
    """Memory in which state lives: a `SparseMemory`, or a `DeviceState`."""

    @property
    def buffer(self) -> Memory: ...
    @property
    def size_bytes(self) -> int: ...
    def reserve(self, begin: int, end: int) -> None:
        """Make [begin, end), whole pages, usable."""


class _Used:
    """The part of the memory in use, for `private_in_children`."""

    def __init__(self, memory: SparseMemory) -> None:
        self.descriptor = memory.descriptor
        self.address = memory.address
        self.size_bytes = 0


class Places:
    """The places of one memory. Training thread only."""

    def __init__(self, memory: StateMemory, *, first: int, align_bytes: int) -> None:
        """
        Args:
            first: the place of the memory's first byte.
            align_bytes: torch's alignment there; addresses stay what they were modulo this.
        """
        self.memory = memory
        self.first = first
        self.align_bytes = align_bytes
        self.used_bytes = 0
        """How far places reach."""
        self._reserved_bytes = 0
        self._free: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._used: _Used | None = None
        if isinstance(memory, SparseMemory):
            self._used = _Used(memory)
            private_in_children(self._used)

    def room(self, size_bytes: int, offset: int) -> int:
        """A place, `offset` bytes behind an aligned one; `reserve` comes before it is used."""
        free = self._free[size_bytes, offset]
        if free:
            return free.pop()
        begin = -(-self.used_bytes // self.align_bytes) * self.align_bytes + offset
        self.used_bytes = begin + size_bytes
        return self.first + begin

    def give_back(self, place: int, size_bytes: int) -> None:
        """Let the next tensor of this size have the place."""
        self._free[size_bytes, place % self.align_bytes].append(place)

    def reserve(self) -> None:
        """Have memory for all places that were given. Raises as its `reserve`."""
        begin, end = self._reserved_bytes, pages(self.used_bytes)
        if end > begin:
            self.memory.reserve(begin, end)
            self._reserved_bytes = end
            if self._used is not None:
                self._used.size_bytes = end

    def begin_again(self, used_bytes: int) -> None:
        """Forget all places but for how far they reach, which a predecessor left."""
        self._free.clear()
        self.used_bytes = used_bytes
        self.reserve()

    def at(self, place: int, size_bytes: int) -> torch.Tensor:
        """The bytes of a place (`bytes_at`)."""
        return bytes_at(self.memory.buffer, place - self.first, size_bytes)
