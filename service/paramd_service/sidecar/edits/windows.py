"""Windows: a ring of shared memory that clients on this host fill with an edit's data.

Its size is sealed, so that a client cannot truncate it while we read. A window's content may
change at any time: it is copied once, and only the copy is checked.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

from paramd.errors import ExhaustedError, UsageError
from paramd.memory import handover
from paramd_service.sidecar.edits.entry import Entry
from paramd_service.sidecar.edits.receive import Part

WINDOW_BYTES = 2 << 20
WINDOW_COUNT = 4
_TURN_BYTES = 64 << 20
"""Most bytes taken in one go before other requests get the thread."""

_PATIENCE_MS = 2
"""How long the thread waits for the next window: about the cost of scheduling it anew."""

_WINDOW = b'{"op": "window"'
MAX_RINGS = 16
"""Clients that may have windows at once: 128 MiB in total."""


class Windows:
    """The windows of one connection, for one edit."""

    open_count = 0

    def __init__(self, entry: Entry) -> None:
        """Raises ExhaustedError: too many clients have windows."""
        if Windows.open_count >= MAX_RINGS:
            raise ExhaustedError(
                f"{MAX_RINGS} clients are staging over shared memory; try again in a moment, or "
                "stage over gRPC"
            )
        self.entry = entry
        size_bytes = WINDOW_BYTES * WINDOW_COUNT
        self.descriptor = os.memfd_create("paramd-windows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.descriptor, 0, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self._map: mmap.mmap | None = mmap.mmap(self.descriptor, size_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise ExhaustedError(f"no memory for windows ({error.strerror})") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        Windows.open_count += 1

    def message(self) -> dict[str, Any]:
        """The answer that hands the windows over."""
        return {
            "op": "staging",
            "window_bytes": WINDOW_BYTES,
            "window_count": WINDOW_COUNT,
            "staged_bytes": self.entry.progress().staged_bytes,
            "size_bytes": self.entry.size_bytes,
        }

    def arriving(self, connection: socket.socket, message: dict[str, Any]) -> Iterator[Part]:
        """Yield a message's data and that of window messages right behind it. Run on a thread.

        Answers all but the last once their data has been taken.

        Raises:
            UsageError: as `named`. OSError: the client is gone.
        """
        waiting = select.poll()
        waiting.register(connection, select.POLLIN)
        turn_bytes = 0
        while True:
            part = self.named(message)
            yield part
            turn_bytes += part[1]
            if turn_bytes >= _TURN_BYTES or self.entry.staged_bytes == self.entry.size_bytes:
                return
            if not waiting.poll(_PATIENCE_MS):
                return
            # Any other message is left to the connection's handler.
            if connection.recv(len(_WINDOW), socket.MSG_PEEK) != _WINDOW:
                return
            handover.send(connection, self.taken())
            message, descriptors = handover.receive(connection)
            for descriptor in descriptors:
                os.close(descriptor)

    def taken(self) -> dict[str, Any]:
        """The answer to a window that has been taken."""
        entry = self.entry
        return {"op": "taken", "staged_bytes": entry.staged_bytes, "size_bytes": entry.size_bytes}

    def named(self, message: dict[str, Any]) -> Part:
        """The data named by a window message.

        Raises:
            UsageError: there is no such window, or a number is missing.
        """
        fields = [message.get(name) for name in ("index", "offset_bytes", "size_bytes")]
        index, offset_bytes, size_bytes = (n if type(n) is int else -1 for n in fields)
        if not (
            0 <= index < WINDOW_COUNT and 0 <= size_bytes <= WINDOW_BYTES and offset_bytes >= 0
        ):
            raise UsageError(
                f"window: index, offset_bytes, size_bytes are {fields}; expected an index below "
                f"{WINDOW_COUNT} and at most {WINDOW_BYTES:,} bytes"
            )
        source = self._address + index * WINDOW_BYTES

        def fill(address: int, begin: int, size: int) -> None:
            ctypes.memmove(address, source + begin, size)

        return offset_bytes, size_bytes, fill

    def close(self) -> None:
        """Release the windows; the client's mapping lives on, but is no longer read."""
        if self._map is not None:
            self._map = None
            os.close(self.descriptor)
            Windows.open_count -= 1
