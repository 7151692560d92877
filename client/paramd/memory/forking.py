"""What a forked child gets of shared memory: a private copy of it, as fork promises.

A shared map would let a child that changes "its" parameters change its parent's. So in
the child every such map becomes copy-on-write at its old address. Pages that the child
has not written yet still show what the parent writes; a child that needs the values of
the fork's moment must copy them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Protocol

_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


class Mapped(Protocol):
    """A map of a descriptor that stays open."""

    @property
    def descriptor(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


_mapped: weakref.WeakSet[Mapped] = weakref.WeakSet()


def private_in_children(mapped: Mapped) -> None:
    """From now on a forked child sees this map copy-on-write."""
    _mapped.add(mapped)


def _remap() -> None:
    for mapped in list(_mapped):
        if mapped.size_bytes == 0:
            continue
        found = _libc.mmap(
            mapped.address,
            mapped.size_bytes,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | _MAP_FIXED,
            mapped.descriptor,
            0,
        )
        if found == _MAP_FAILED:
            # Better a dead child than a changed parent.
            os._exit(70)


os.register_at_fork(after_in_child=_remap)
