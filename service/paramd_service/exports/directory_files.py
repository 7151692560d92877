"""Files of an export's directory: written under another name until they are whole, and read."""

from __future__ import annotations

import ctypes
import os
import secrets
from contextlib import suppress

_SYNC_FILE_RANGE_WRITE = 2
_WRITEBACK_BYTES = 32 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class DirectorySink:
    """A file under another name until it is whole."""

    def __init__(self, folder: int, name: str) -> None:
        """Takes over the descriptor `folder`."""
        self._folder = folder
        self._name = name
        self._part = f".{name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._part, flags, 0o666, dir_fd=folder)
        self._written = 0
        self._begun = 0

    def write(self, data: memoryview) -> None:
        while data:
            written = os.write(self._file, data)
            self._written += written
            data = data[written:]
        if self._written - self._begun >= _WRITEBACK_BYTES:
            # The disk begins now, instead of at the end when all would wait for it.
            size = self._written - self._begun
            _libc.sync_file_range(self._file, self._begun, size, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._written

    def finish(self) -> None:
        os.fsync(self._file)
        os.rename(self._part, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._close()

    def abort(self) -> None:
        if self._file < 0:
            return
        with suppress(FileNotFoundError):
            os.unlink(self._part, dir_fd=self._folder)
        self._close()

    def _close(self) -> None:
        os.close(self._file)
        os.close(self._folder)
        self._file = -1


class DirectorySource:
    """A file to read."""

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        self.size_bytes = os.fstat(descriptor).st_size

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        return os.pread(self._file, size_bytes, offset_bytes)

    def close(self) -> None:
        os.close(self._file)
