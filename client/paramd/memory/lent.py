"""Memory that a client lends to sidecars of its host: they map it and copy from it.

It is a memfd whose size is sealed: a sidecar must not be killed by SIGBUS because a client
truncated what it reads. Its content may change at any time, also while it is read.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Self

from paramd.errors import ExhaustedError
from paramd.memory.descriptors import create_memory

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_all: weakref.WeakSet[LentMemory] = weakref.WeakSet()


class LentMemory(mmap.mmap):
    """A shared mapping with its descriptor; both live as long as a tensor in it."""

    descriptor: int
    address: int

    def __new__(cls, size_bytes: int) -> Self:
        """Allocated as a whole: a store that finds no memory would end in SIGBUS.

        Raises:
            ExhaustedError: the machine does not have that much memory.
        """
        descriptor = create_memory("paramd-lent", size_bytes, sealable=True)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self = super().__new__(cls, descriptor, size_bytes)
        except OSError as error:
            os.close(descriptor)
            raise ExhaustedError(
                f"{size_bytes:,} bytes of memory could not be mapped ({error.strerror})"
            ) from error
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.descriptor = descriptor
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        _all.add(self)
        return self

    def begin_of(self, address: int, size_bytes: int) -> int | None:
        """Where in this memory the bytes at `address` lie; None if they do not."""
        begin = address - self.address
        return begin if 0 <= begin <= len(self) - size_bytes else None


def lent_memory(address: int, size_bytes: int) -> LentMemory | None:
    """The memory in which these bytes of this process lie."""
    return next((one for one in _all if one.begin_of(address, size_bytes) is not None), None)
