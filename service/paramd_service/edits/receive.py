"""An edit's incoming data: copied, digested and checked, in order, block by block.

The checks read the staged copy, shared only with the trainer, so a sender cannot change what was
checked.

A client on this host lends memory that has the data; it is mapped here, read-only. Its size must be
sealed: a client that truncates it during a read would kill this process with SIGBUS. So would a
hole in huge pages when none are left, so those are refused as well. A hole in other memory reads as
zeros. The content may change at any time: it is copied once, and only the copy is checked.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from paramd.errors import ExhaustedError, UsageError
from paramd.layout.dtypes import DTYPES, item_bytes
from paramd.memory import handover
from paramd.wire import Chunk
from paramd_service.sidecar.uploads import Fill, Part

if TYPE_CHECKING:
    from paramd_service.edits.entry import Entry

_GRAIN = 64
"""Blocks end at multiples of this, so that no element is split."""
_BLOCK_BYTES = 512 << 10
"""Bytes copied, checked and digested at a time: they stay in a core's cache."""
_EXPONENTS = {name: (one.item_bytes, one.exponent) for name, one in DTYPES.items() if one.exponent}
"""Element size in bytes, and the mask of exponent bits: all set in NaN and infinities."""


@dataclass(frozen=True, slots=True)
class DataRange:
    """Elements of one item: [begin, end) in bytes of the rank's data."""

    op: int
    begin: int
    end: int
    dtype: str
    fqn: str


class NonfiniteError(UsageError):
    """An edit's data has NaN or infinities that were not explicitly allowed."""


class Intake:
    """The incoming data of one edit. Used by one thread at a time."""

    def __init__(
        self,
        memory: memoryview,
        address: int,
        ranges: Sequence[DataRange],
        *,
        op_count: int,
        allow_nonfinite: bool,
    ) -> None:
        """`memory`: the bytes at `address`, where the data goes; `ranges` are sorted."""
        self.size_bytes = memory.nbytes
        self.staged_bytes = 0
        """Bytes present without a gap from the start."""
        self._memory = memory
        self._address = address
        self._ranges = ranges
        self._allow_nonfinite = allow_nonfinite
        self._digests = [xxhash.xxh3_128() for _ in range(op_count)]
        self._verified = 0
        self._next = 0

    def take_all(self, parts: Iterable[Part]) -> None:
        """Take each part in order; see `take`."""
        for part in parts:
            self.take(*part)

    def take(self, offset_bytes: int, size_bytes: int, fill: Fill) -> None:
        """Take bytes [offset, offset + size); a part that was taken before is ignored.

        Raises:
            UsageError: For a gap, or beyond the end.
            NonfiniteError: For numbers that are not finite, after which the intake is unusable.
        """
        end = offset_bytes + size_bytes
        if 0 <= offset_bytes <= end <= self.staged_bytes:
            return
        if offset_bytes != self.staged_bytes or not offset_bytes <= end <= self.size_bytes:
            raise UsageError(
                f"offset_bytes: {size_bytes} bytes from {offset_bytes} on; {self.staged_bytes} of "
                f"{self.size_bytes} are staged, so continue there"
            )
        for at in range(offset_bytes, end, _BLOCK_BYTES):
            block_end = min(at + _BLOCK_BYTES, end)
            fill(self._address + at, at - offset_bytes, block_end - at)
            whole = block_end == self.size_bytes
            self._verify(block_end if whole else block_end // _GRAIN * _GRAIN)
            self.staged_bytes = block_end

    def digests(self) -> list[bytes]:
        """XXH3 (128 bit, canonical) of each operation's data, once all of it has arrived."""
        assert self.staged_bytes == self.size_bytes
        return [state.digest() for state in self._digests]

    def _verify(self, end: int) -> None:
        while self._next < len(self._ranges):
            part = self._ranges[self._next]
            low, high = max(part.begin, self._verified), min(part.end, end)
            if low < high:
                block = self._memory[low:high]
                if not self._allow_nonfinite and not is_finite(block, part.dtype):
                    raise NonfiniteError(_nonfinite(block, part, low))
                self._digests[part.op].update(block)
            if part.end > end:
                break
            self._next += 1
        self._verified = end


def copy_of(chunk: Chunk) -> Fill:
    """A `Fill` from bytes received over the network; its first call raises DataLossError if they do
    not match their checksum."""

    def fill(target: int, begin: int, size_bytes: int) -> None:
        if begin == 0:
            chunk.check()
        ctypes.memmove(target, chunk.address + begin, size_bytes)

    return fill


def is_finite(block: memoryview, dtype: str) -> bool:
    """Whether no element is NaN or infinite; dtypes without such numbers always pass. Loads numpy
    on first use. The block begins at a multiple of 64 bytes."""
    if not block.nbytes or dtype not in _EXPONENTS:
        return True
    import numpy as np

    size, exponent = _EXPONENTS[dtype]
    sign = 1 << 8 * size - 1
    # As integers: two maxima over the cached block are faster than any elementwise test.
    # Positive non-finite numbers are the largest as signed, negative ones as unsigned.
    return (
        int(np.frombuffer(block, f"i{size}").max()) < exponent
        and int(np.frombuffer(block, f"u{size}").max()) < sign | exponent
    )


def _nonfinite(block: memoryview, part: DataRange, low: int) -> str:
    import numpy as np

    size, exponent = _EXPONENTS[part.dtype]
    bad = (np.frombuffer(block, f"u{size}") & exponent) == exponent
    first = (low - part.begin) // item_bytes(part.dtype) + int(bad.argmax())
    return (
        f"the data for {part.fqn!r} holds NaN or infinite numbers, first at element {first} of "
        "this rank's part; an admin may allow that with allow_nonfinite"
    )


MAX_MEMORIES = 8
"""Memories that one connection may lend."""
MAX_TAKE_BYTES = 64 << 20
"""Most bytes of one message, and of one turn before other requests get the thread."""
_PATIENCE_MS = 2
"""How long the thread waits for the next message: about the cost of scheduling it again."""

_MAP_NORESERVE = 0x4000  # Python 3.11 does not name it

_TAKE = b'{"op": "take"'


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A mapping, which lives as long as this object."""

    memory: mmap.mmap
    address: int
    size_bytes: int


def _mapped(descriptor: int) -> _Mapped:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        status, system = os.fstat(descriptor), os.fstatvfs(descriptor)
    except OSError as error:
        raise UsageError(f"lend: the descriptor is no memfd ({error.strerror})") from error
    if not seals & fcntl.F_SEAL_SHRINK or system.f_bsize != mmap.PAGESIZE or not status.st_size:
        raise UsageError(
            "lend: a memory that can shrink, of huge pages, or empty; expected a memfd of plain "
            "pages with F_SEAL_SHRINK"
        )
    try:
        # Private and writable, because ctypes gives no address otherwise. Nothing is written, so
        # every page is the client's, and none counts as this process'.
        memory = mmap.mmap(
            descriptor,
            status.st_size,
            flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    except (OSError, ValueError, OverflowError) as error:
        raise ExhaustedError(
            f"lend: {status.st_size:,} bytes of lent memory could not be mapped ({error})"
        ) from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return _Mapped(memory, address, status.st_size)


class Lent:
    """The memories that one connection lends, and the edit that is staged from them."""

    def __init__(self) -> None:
        self._maps: list[_Mapped] = []
        self._entry: Entry | None = None

    @property
    def entry(self) -> Entry:
        """The staged edit. Raises UsageError if there is none."""
        if self._entry is None:
            raise UsageError("take: no edit yet; send stage first")
        return self._entry

    def lend(self, descriptors: Sequence[int]) -> dict[str, Any]:
        """Map one more memory and return the answer; the descriptors stay the caller's.

        Raises:
            UsageError: Not one memory, or one that could change its size.
            ExhaustedError: Too many memories, or no room for the mapping.
        """
        if len(descriptors) != 1:
            raise UsageError(f"lend: {len(descriptors)} descriptors; expected one memory")
        if len(self._maps) == MAX_MEMORIES:
            raise ExhaustedError(f"lend: {MAX_MEMORIES} memories are lent; connect again")
        self._maps.append(_mapped(descriptors[0]))
        return {"op": "lent", "memory": len(self._maps) - 1}

    def stage(self, entry: Entry) -> dict[str, Any]:
        """Take the data of this edit from now on, and return the answer."""
        self._entry = entry
        return {"op": "staging", **self._progress()}

    def arriving(self, connection: socket.socket, message: dict[str, Any]) -> Iterator[Part]:
        """Yield a message's data and that of messages right behind it; answer all but the last once
        their data has been taken. Run on a thread.

        Raises:
            UsageError: As `named`.
            OSError: The client is gone.
        """
        waiting = select.poll()
        waiting.register(connection, select.POLLIN)
        turn_bytes = 0
        while True:
            for part in self.named(message):
                yield part
                turn_bytes += part[1]
            if turn_bytes >= MAX_TAKE_BYTES or self.entry.staged_bytes == self.entry.size_bytes:
                return
            if not waiting.poll(_PATIENCE_MS):
                return
            # Any other message is left to the connection's handler.
            if connection.recv(len(_TAKE), socket.MSG_PEEK) != _TAKE:
                return
            handover.send(connection, self.taken())
            message, descriptors = handover.receive(connection)
            for descriptor in descriptors:
                os.close(descriptor)

    def taken(self) -> dict[str, Any]:
        """The answer to a message whose data has been taken."""
        return {"op": "taken", **self._progress()}

    def named(self, message: dict[str, Any]) -> list[Part]:
        """The data named by a message, checked as a whole before any of it is taken.

        Raises:
            UsageError: If it names bytes that were not lent, or too many, or is malformed.
        """
        offset_bytes, spans = message.get("offset_bytes"), message.get("spans")
        if type(offset_bytes) is not int or offset_bytes < 0 or not isinstance(spans, list):
            raise UsageError(
                "take: expected offset_bytes, 0 or more, and spans, a list of [memory, begin, "
                "size_bytes]"
            )
        parts: list[Part] = []
        begin_bytes = offset_bytes
        for span in spans:
            part = self._part(offset_bytes, span)
            parts.append(part)
            offset_bytes += part[1]
        if offset_bytes - begin_bytes > MAX_TAKE_BYTES:
            raise UsageError(f"take: more than {MAX_TAKE_BYTES:,} bytes; split them")
        return parts

    def _part(self, offset_bytes: int, span: object) -> Part:
        if not (isinstance(span, list) and [type(n) for n in span] == [int] * 3):
            raise UsageError("take: a span is not [memory, begin, size_bytes], all whole numbers")
        number, begin, size_bytes = span
        if not 0 <= number < len(self._maps):
            raise UsageError(f"take: memory {number}; {len(self._maps)} are lent")
        memory = self._maps[number]
        if not (begin >= 0 and 0 <= size_bytes <= memory.size_bytes - begin):
            raise UsageError(
                f"take: {size_bytes} bytes from {begin} on of a memory of {memory.size_bytes} bytes"
            )

        def fill(address: int, done: int, size: int) -> None:
            ctypes.memmove(address, memory.address + begin + done, size)

        return offset_bytes, size_bytes, fill

    def _progress(self) -> dict[str, int]:
        entry = self.entry
        return {"staged_bytes": entry.staged_bytes, "size_bytes": entry.size_bytes}

    def close(self) -> None:
        """Release the memories. Idempotent."""
        self._maps, self._entry = [], None
