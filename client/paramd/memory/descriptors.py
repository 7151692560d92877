"""Kernel objects that outlive either process: memory, sparse memory, eventfds, pidfds.

Also memory that a client lends to sidecars of its host: they map it and copy from it. It is a memfd
whose size is sealed: a client that truncates the memory must not kill a reading sidecar by SIGBUS.
Its content may change at any time, also while it is read.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from paramd.errors import ExhaustedError
from paramd.memory.left import HEADROOM, Purpose, Room, memory_now

PAGE = mmap.PAGESIZE
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# madvise(2): fault all pages in for writing now (Linux 5.14).
_MADV_POPULATE_WRITE = 23

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_all: weakref.WeakSet[LentMemory] = weakref.WeakSet()


def create_memory(
    name: str, size_bytes: int, room: Room = HEADROOM, purpose: Purpose = Purpose.TRAINING
) -> int:
    """A descriptor of `size_bytes` of zeroed shared memory, fully allocated.

    With a bare ftruncate, the first store beyond the machine's memory would end in SIGBUS.

    Raises:
        ExhaustedError: If `room` does not grant that much memory, or the kernel refuses it.
    """
    with room.claimed(purpose, size_bytes):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if size_bytes:
                os.posix_fallocate(descriptor, 0, size_bytes)
            _seal(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise ExhaustedError(
                f"{name}: the kernel refused {size_bytes:,} bytes of shared memory "
                f"({error.strerror}); {available_bytes():,} were available"
            ) from error
        return descriptor


def available_bytes() -> int:
    """Memory this process can still allocate: the machine's, or what its cgroups leave if less."""
    return memory_now().left_bytes


def wake_event() -> int:
    """An eventfd with which the trainer wakes its sidecar."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def wake(descriptor: int) -> None:
    """Wake the reader of an eventfd; never blocks, never raises on a full counter."""
    # Full means 2**64 - 2 pending wakes: the reader will wake anyway.
    with suppress(BlockingIOError):
        os.eventfd_write(descriptor, 1)


def pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process exits."""
    return os.pidfd_open(pid)


def is_pidfd_of_elsewhere(descriptor: int) -> bool:
    """Whether it is a pidfd of a process that this pid namespace does not have."""
    fields = _read(f"/proc/self/fdinfo/{descriptor}").split()
    # -1: it has been reaped since.
    named = fields[fields.index("Pid:") + 1] if "Pid:" in fields else ""
    return named in ("0", "-1")


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def same_object(one: int, other: int) -> bool:
    return os.path.samestat(os.fstat(one), os.fstat(other))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def create_sparse(name: str, size_bytes: int) -> int:
    """A descriptor of `size_bytes` of shared memory (rounded up to pages), none allocated."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, pages(size_bytes))
    _seal(descriptor)
    return descriptor


def _seal(descriptor: int) -> None:
    """Keep its size for good, and others of this host out."""
    # Who maps memory that another process makes shorter ends by SIGBUS.
    os.fchmod(descriptor, 0o600)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)


def pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE) * PAGE


def populate(address: int, size_bytes: int) -> int:
    """Fault in whole pages for writing; the errno if that failed, else 0."""
    # ctypes releases the GIL; mmap.madvise would hold it throughout.
    failed = _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0


def reserved_bytes(descriptor: int) -> int:
    """Bytes of sparse memory that have pages."""
    return os.fstat(descriptor).st_blocks * 512


class SparseMemory:
    """Memory sized for the worst case, with pages only where reserved. Ranges are whole pages.

    The sidecar reserves and releases. The trainer maps the same descriptor once and touches
    reserved ranges only; any other byte may raise SIGBUS.
    """

    def __init__(
        self, descriptor: int, room: Room = HEADROOM, purpose: Purpose = Purpose.TRAINING
    ) -> None:
        """`room` grants what is reserved, which is for `purpose`."""
        self._room, self._purpose = room, purpose
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self._map: mmap.mmap | None = mmap.mmap(descriptor, self.size_bytes)
        self.buffer = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def reserve(self, begin: int, end: int, *, needed: bool = False) -> None:
        """Allocate a range of zeros. May take long. Raises ExhaustedError without memory.

        `needed`: grant all but a little of what is left, whatever the room says.
        """
        if begin == end:
            # A rank that has none of it; the kernel takes no empty range.
            return
        room = HEADROOM if needed else self._room
        with room.claimed(self._purpose, end - begin):
            try:
                os.posix_fallocate(self.descriptor, begin, end - begin)
            except OSError as error:
                self.release(begin, end)
                raise ExhaustedError(
                    f"the kernel refused {end - begin:,} bytes of shared memory ({error.strerror})"
                ) from error

    def populate(self, begin: int, end: int, *, needed: bool = False) -> None:
        """As `reserve`, and spare the first copy the page faults; older kernels ignore that."""
        self.reserve(begin, end, needed=needed)
        _libc.madvise(self.address + begin, end - begin, _MADV_POPULATE_WRITE)

    def release(self, begin: int, end: int) -> None:
        """Give a range's pages back to the kernel."""
        how = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        if end > begin and _libc.fallocate(self.descriptor, how, begin, end - begin):
            raise OSError(ctypes.get_errno(), "a hole could not be punched")

    def close(self) -> None:
        """Drop the map, which goes with its last user. The descriptor stays with its owner."""
        self.buffer, self.descriptor = memoryview(b""), -1  # whose number may be another's soon
        self._map = None


class LentMemory(mmap.mmap):
    """A shared mapping with its descriptor; both live as long as a tensor in it."""

    descriptor: int
    address: int

    def __new__(cls, size_bytes: int) -> Self:
        """Allocated as a whole, or a store might end in SIGBUS; ExhaustedError without memory."""
        descriptor = create_memory("paramd-lent", size_bytes)
        try:
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
        """Offset in this memory of the bytes at `address`; None if they are elsewhere."""
        begin = address - self.address
        return begin if 0 <= begin <= len(self) - size_bytes else None


def lent_memory(address: int, size_bytes: int) -> LentMemory | None:
    """The memory in which these bytes of this process lie."""
    return next((one for one in _all if one.begin_of(address, size_bytes) is not None), None)
