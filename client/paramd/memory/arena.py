"""The arena: memory behind a descriptor, mapped into this process, and its mirrored form.

In forked children shared memory becomes private, as fork promises: through a shared map, a child
changing "its" parameters would change its parent's. So in the child every such map becomes
copy-on-write at its old address. Pages the child has not written yet still show the parent's
stores; a child that needs the values as of the fork must copy them.

A mirrored arena (word MIRRORED) is a copy of parameters that stay in the trainer's own memory.
It may serve a snapshot of boundary request MIRRORED_FOR only, whose state MIRRORED_STEP and
MIRRORED_EDITS name; all bytes that request did not ask for date from earlier steps.

The trainer writes MIRRORED_FOR = 0 before it writes to the arena and n afterwards; numbers are
never reused. So a copy throughout which MIRRORED_FOR was n is consistent, whatever the training
did meanwhile: updates do not touch the arena and wait for no copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from typing import Protocol

from paramd.memory.control_page import Word, Words
from paramd.memory.descriptors import populate

_PAGE_BYTES = 4096
_BITS = 31
_MASK = (1 << _BITS) - 1
_NOTHING = 1 << _BITS | 1
"""An empty range: asks only which state it is."""

_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


def is_mirror(words: Words) -> bool:
    """Whether the arena is a copy, refreshed only at boundaries that ask for it."""
    return words[Word.MIRRORED] != 0


def pack_wanted(spans: Iterable[tuple[int, int]]) -> int:
    """The ARGUMENT for half-open byte spans of the arena, possibly none.

    One range of whole pages around all spans, so that the trainer need not copy everything
    for a reader of one tensor. Ranges beyond 8 TiB do not fit: they give 0, which no trainer
    answers, so the request is missed rather than filled with the wrong bytes.
    """
    found = list(spans)
    if not found:
        return _NOTHING
    begin = min(begin for begin, _ in found) // _PAGE_BYTES
    end = -(-max(end for _, end in found) // _PAGE_BYTES)
    return begin << _BITS | end if end <= _MASK else 0


def unpack_wanted(argument: int) -> tuple[int, int]:
    return (argument >> _BITS) * _PAGE_BYTES, (argument & _MASK) * _PAGE_BYTES


class HostArena:
    """A memfd mapped shared and writable.

    `buffer` exports the memory. A tensor made on it references the map without a buffer
    export, so the map is never closed explicitly: it lasts as long as its last holder.
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
        if populate(self.address, len(self._map)):
            ctypes.memset(self.address, 0, self.size_bytes)

    def close(self) -> None:
        self.buffer = memoryview(b"")
        self._map = None


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
