"""Sparse shared memory: sized for the worst case, with pages only where reserved.

The sidecar reserves and releases; the trainer maps the same descriptor once and touches
reserved ranges only. Touching any other byte could end in SIGBUS.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from paramd.errors import ExhaustedError
from paramd.memory.descriptors import HEADROOM_BYTES, available_bytes

PAGE = mmap.PAGESIZE
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def create_sparse(name: str, size_bytes: int) -> int:
    """A descriptor of `size_bytes` of shared memory (rounded up to pages), none allocated."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, pages(size_bytes))
    return descriptor


def pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE) * PAGE


def reserved_bytes(descriptor: int) -> int:
    """Bytes of sparse memory that have pages."""
    return os.fstat(descriptor).st_blocks * 512


class SparseMemory:
    """Sparse memory mapped into this process. Ranges are half-open bytes in whole pages."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self._map: mmap.mmap | None = mmap.mmap(descriptor, self.size_bytes)
        self.buffer = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def reserve(self, begin: int, end: int) -> None:
        """Allocate a range; new pages are zero. May take long.

        Raises:
            ExhaustedError: the machine (or container) does not have that much memory.
        """
        available = available_bytes()
        if end - begin + HEADROOM_BYTES > available:
            raise ExhaustedError(
                f"{end - begin:,} bytes of shared memory are needed, {available:,} are available "
                f"(and {HEADROOM_BYTES:,} are left to others); ask for less at a time"
            )
        try:
            os.posix_fallocate(self.descriptor, begin, end - begin)
        except OSError as error:
            self.release(begin, end)
            raise ExhaustedError(
                f"the kernel refused {end - begin:,} bytes of shared memory ({error.strerror})"
            ) from error

    def release(self, begin: int, end: int) -> None:
        """Give a range's pages back to the kernel."""
        how = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        if end > begin and _libc.fallocate(self.descriptor, how, begin, end - begin):
            raise OSError(ctypes.get_errno(), "a hole could not be punched")

    def close(self) -> None:
        """Drop the map, which goes with its last user. The descriptor stays with its owner."""
        self.buffer = memoryview(b"")
        self._map = None
