"""An arena: memory behind a descriptor, mapped here. CUDA arenas are its second kind."""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

# madvise(2): fault all pages in for writing now (Linux 5.14).
_MADV_POPULATE_WRITE = 23


class Arena(Protocol):
    """Memory that both processes reach by one descriptor.

    The sidecar makes it, the trainer maps it; it lives until both have let go, in
    whatever order they end.
    """

    descriptor: int
    size_bytes: int

    def close(self) -> None:
        """Unmaps it here. Idempotent. The descriptor stays its owner's."""


class HostArena:
    """A memfd mapped shared and writable.

    `buffer` exports the memory. A tensor made on it holds the map by reference, not by a
    buffer export, so the map is never closed by hand: it goes with its last holder.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        # A map of length 0 is an error; an empty arena still needs an address.
        self._map: mmap.mmap | None = (
            mmap.mmap(descriptor, size_bytes) if size_bytes else mmap.mmap(-1, mmap.PAGESIZE)
        )
        self.buffer = memoryview(self._map)[:size_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def populate(self) -> None:
        """Faults all pages in, so that no later copy pays for first touch."""
        assert self._map is not None
        # Through ctypes: mmap.madvise would hold the interpreter's lock for all that time.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if madvise(self.address, len(self._map), _MADV_POPULATE_WRITE):
            ctypes.memset(self.address, 0, self.size_bytes)

    def close(self) -> None:
        self.buffer = memoryview(b"")
        self._map = None
