"""An arena: memory behind a descriptor, mapped into this process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

# madvise(2): fault all pages in for writing now (Linux 5.14).
_MADV_POPULATE_WRITE = 23


class Arena(Protocol):
    """Memory that both processes reach through one descriptor.

    The sidecar creates it, the trainer maps it; it lives until both have released it, in
    either order.
    """

    descriptor: int
    size_bytes: int

    def close(self) -> None:
        """Unmap it in this process. Idempotent. The descriptor stays with its owner."""


class HostArena:
    """A memfd mapped shared and writable.

    `buffer` exports the memory. A tensor made on it references the map without a buffer
    export, so the map is never closed explicitly: it goes with its last holder.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        # Mapping length 0 is an error; an empty arena still needs an address.
        self._map: mmap.mmap | None = (
            mmap.mmap(descriptor, size_bytes) if size_bytes else mmap.mmap(-1, mmap.PAGESIZE)
        )
        self.buffer = memoryview(self._map)[:size_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def populate(self) -> None:
        """Fault in all pages, so that no later copy pays for first touches."""
        assert self._map is not None
        # ctypes releases the GIL; mmap.madvise would hold it throughout.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if madvise(self.address, len(self._map), _MADV_POPULATE_WRITE):
            ctypes.memset(self.address, 0, self.size_bytes)

    def close(self) -> None:
        self.buffer = memoryview(b"")
        self._map = None
