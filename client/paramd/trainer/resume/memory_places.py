"""The places of one memory, in host memory or on a device, for what outlives the trainer."""

from __future__ import annotations

from collections import defaultdict

import torch

from paramd.memory.arena import private_in_children
from paramd.memory.descriptors import SparseMemory, pages
from paramd.trainer.home.device import DeviceState
from paramd.trainer.home.moving import bytes_at


class _Used:
    """The part of the memory in use, for `private_in_children`."""

    def __init__(self, memory: SparseMemory) -> None:
        self.descriptor = memory.descriptor
        self.address = memory.address
        self.size_bytes = 0


class Places:
    """The places of one memory. Training thread only."""

    def __init__(self, memory: SparseMemory | DeviceState, *, first: int, align_bytes: int) -> None:
        """`first`: the place of the memory's first byte. Addresses keep their values modulo
        `align_bytes`, torch's alignment there.
        """
        self.memory = memory
        self.first = first
        self.align_bytes = align_bytes
        self.used_bytes = 0
        """The end of the last place."""
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
        """Have memory for all places that were given out. Raises as its `reserve`."""
        begin, end = self._reserved_bytes, pages(self.used_bytes)
        if end > begin:
            self.memory.reserve(begin, end)
            self._reserved_bytes = end
            if self._used is not None:
                self._used.size_bytes = end

    def begin_again(self, used_bytes: int) -> None:
        """Forget all places, but not their end, which an earlier trainer left."""
        self._free.clear()
        self.used_bytes = used_bytes
        self.reserve()

    def at(self, place: int, size_bytes: int) -> torch.Tensor:
        return bytes_at(self.memory.buffer, place - self.first, size_bytes)
