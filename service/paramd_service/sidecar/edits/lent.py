"""An edit's data in memory that a client on this host lends: mapped here, read-only.

Only memory whose size is sealed is taken: a client that truncates what we read would kill us with
SIGBUS. So would a hole in huge pages when none are left, so those are refused as well. A hole in
any other reads as zeros. The content may change at any time: it is copied once, and only the copy
is checked.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paramd.errors import ExhaustedError, UsageError
from paramd.memory import handover
from paramd_service.sidecar.edits.entry import Entry
from paramd_service.sidecar.edits.receive import Part

MAX_MEMORIES = 8
"""Memories that one connection may lend."""

MAX_TAKE_BYTES = 64 << 20
"""Most bytes of one message, and taken in one go before other requests get the thread."""

_PATIENCE_MS = 2
"""How long the thread waits for the next message: about the cost of scheduling it anew."""

_MAP_NORESERVE = 0x4000  # Python 3.11 does not name it

_TAKE = b'{"op": "take"'


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A mapping, which lives as long as this."""

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
        # every page is the client's, and none counts as ours.
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
        """Raises UsageError: none is staged."""
        if self._entry is None:
            raise UsageError("take: no edit yet; send stage first")
        return self._entry

    def lend(self, descriptors: Sequence[int]) -> dict[str, Any]:
        """Map one more memory and return the answer; the descriptors stay the caller's.

        Raises:
            UsageError: not one memory, or one that could change its size.
            ExhaustedError: too many memories, or no room for the mapping.
        """
        if len(descriptors) != 1:
            raise UsageError(f"lend: {len(descriptors)} descriptors; expected one memory")
        if len(self._maps) == MAX_MEMORIES:
            raise ExhaustedError(f"lend: {MAX_MEMORIES} memories are lent; connect anew")
        self._maps.append(_mapped(descriptors[0]))
        return {"op": "lent", "memory": len(self._maps) - 1}

    def stage(self, entry: Entry) -> dict[str, Any]:
        """Take the data of this edit from now on, and return the answer."""
        self._entry = entry
        return {"op": "staging", **self._progress()}

    def arriving(self, connection: socket.socket, message: dict[str, Any]) -> Iterator[Part]:
        """Yield a message's data and that of messages right behind it. Run on a thread.

        Answers all but the last once their data has been taken.

        Raises:
            UsageError: as `named`. OSError: the client is gone.
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
            UsageError: it names bytes that were not lent, or too many, or is malformed.
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
        """Let go of the memories. Idempotent."""
        self._maps, self._entry = [], None
