"""Make shared memory private in forked children, as fork promises.

Through a shared map, a child changing "its" parameters would change its parent's. So in the
child every such map becomes copy-on-write at its old address. Pages the child has not written
yet still show the parent's stores; a child that needs the values as of the fork must copy them.
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
    """A mapping whose descriptor stays open."""

    @property
    def descriptor(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


_mapped: weakref.WeakSet[Mapped] = weakref.WeakSet()


def private_in_children(mapped: Mapped) -> None:
    """Make this mapping copy-on-write in children forked from now on."""
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
            # Still shared: better kill the child than let it change its parent's parameters.
            os._exit(70)


os.register_at_fork(after_in_child=_remap)
