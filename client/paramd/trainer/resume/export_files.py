"""The files of an export in a directory, which anybody may have written."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack

from xxhash import xxh3_128

from paramd.answers import read_descriptor
from paramd.bounds import Bound, OverBoundError
from paramd.errors import DataLossError, NotFoundError

CHUNK_BYTES = 16 << 20
"""Most bytes read at a time."""

MANIFEST = "paramd-export.json"


class ExportFiles:
    """The files of one export, open to be read. `close` it."""

    def __init__(self, directory: str) -> None:
        """`directory`: its absolute path."""
        self._directory = directory
        self._closing = ExitStack()
        self._descriptors: dict[str, int] = {}

    def open(self, name: str) -> None:
        """Open a file.

        Raises:
            DataLossError: If it is none, or its name is another path.
            NotFoundError: If it is missing.
            OSError: If it cannot be opened.
        """
        if name in (".", "..") or "/" in name or "\0" in name:
            raise DataLossError(f"its {MANIFEST} names a file {name[:80]!r}")
        # Non-blocking: a FIFO of that name must not hang the training.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(os.path.join(self._directory, name), flags)
        except FileNotFoundError:
            raise NotFoundError(f"{self._directory} has no {name}") from None
        self._closing.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataLossError(f"{name} is not a file")
        self._descriptors[name] = descriptor

    def verify(self, name: str, size_bytes: int, xxh3: str) -> None:
        """Raise DataLossError unless an open file has that size and checksum."""
        found_bytes = os.fstat(self._descriptors[name]).st_size
        summed = xxh3_128()
        for begin in range(0, size_bytes if found_bytes == size_bytes else 0, CHUNK_BYTES):
            size = min(CHUNK_BYTES, size_bytes - begin)
            summed.update(self.read(name, begin, size))
        if found_bytes != size_bytes or summed.hexdigest() != xxh3:
            raise DataLossError(f"{name} is damaged: it is not what was exported")

    def whole(self, name: str, bound: Bound) -> bytes:
        """A whole file that is open; DataLossError if it is longer than the bound."""
        try:
            return read_descriptor(self._descriptors[name], bound)
        except OverBoundError as error:
            raise DataLossError(f"{name} cannot be read ({error})") from None

    def read(self, name: str, begin: int, size: int) -> bytearray:
        """Exactly `size` bytes of an open file; DataLossError if it ends before."""
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = os.preadv(self._descriptors[name], [view[done:]], begin + done)
            if not count:
                raise DataLossError(f"{name} ends too early")
            done += count
        return data

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._closing.close()
        self._descriptors = {}
