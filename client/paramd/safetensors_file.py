"""Write a safetensors file tensor by tensor; it appears under its name once complete.

    with SafetensorsWriter(path, specs, metadata={"format": "pt"}) as writer:
        for spec in writer.specs:          # in file order
            for chunk in ...:
                writer.append(chunk)

Never holds more than one chunk. The format: eight bytes of header length, a JSON header, then
the bytes of all tensors back to back. Source: huggingface/safetensors.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from paramd.errors import ConflictError, ExhaustedError, UsageError
from paramd.layout.exports.safetensors import (
    MAX_HEADER_BYTES,
    TensorSpec,
    encode_header,
    file_order,
)

__all__ = ["MAX_HEADER_BYTES", "SafetensorsWriter", "TensorSpec", "encode_header"]


class SafetensorsWriter:
    """A file being written, under a temporary name next to it, and renamed at the end.

    Leaving the block with an exception, or with bytes missing, leaves nothing behind.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str],
        replace: bool = False,
    ) -> None:
        """No I/O yet.

        Args:
            path: the file to write; its directory must exist.
            specs: the tensors; see `self.specs` for their order in the file.
            metadata: strings for the header.
            replace: whether an existing file may be overwritten.

        Raises:
            UsageError: a duplicate name, a dtype the format lacks, or too long a header.
        """
        self.path = path
        self.specs = file_order(specs)
        self._header = encode_header(self.specs, metadata)
        self.size_bytes = len(self._header) + sum(spec.size_bytes for spec in specs)
        self._replace = replace
        self._part = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
        self._file: BinaryIO | None = None

    def __enter__(self) -> SafetensorsWriter:
        """Open the temporary file and write the header.

        Raises:
            ConflictError: the name is taken and may not be replaced.
            ExhaustedError: not enough disk space.
        """
        self._check_free()
        self._check_room()
        # Not mkstemp: the file should get its mode from the user's umask.
        self._file = self._part.open("xb")
        self._file.write(self._header)
        return self

    def append(self, chunk: bytes | bytearray | memoryview) -> None:
        """Write the next bytes, row-major little-endian, of the tensors in file order."""
        assert self._file is not None
        self._file.write(chunk)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            with self._file as file:
                if error is None:
                    self._finish(file)
            if error is None:
                self._publish()
        finally:
            with suppress(FileNotFoundError):
                self._part.unlink()

    def _finish(self, file: BinaryIO) -> None:
        file.flush()
        if file.tell() != self.size_bytes:
            raise UsageError(
                f"{self.path}: {file.tell():,} bytes were written, the header promises "
                f"{self.size_bytes:,}; the file was dropped"
            )
        os.fsync(file.fileno())

    def _publish(self) -> None:
        if self._replace:
            os.replace(self._part, self.path)
        else:
            try:
                # link, unlike rename, fails if the name was taken since `__enter__` checked.
                os.link(self._part, self.path)
            except FileExistsError:
                self._refuse()
            except OSError:
                # No hard links on this file system; a small race is left.
                self._check_free()
                os.rename(self._part, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _check_free(self) -> None:
        if not self._replace and os.path.lexists(self.path):
            self._refuse()

    def _refuse(self) -> None:
        raise ConflictError(f"{self.path} exists; give another name, or --force to replace it")

    def _check_room(self) -> None:
        try:
            found = os.statvfs(self.path.parent)
        except OSError as error:
            raise UsageError(f"{self.path.parent} cannot be written to: {error.strerror}") from None
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < self.size_bytes:
            raise ExhaustedError(
                f"{self.path}: {self.size_bytes:,} bytes are needed, {free_bytes:,} are free on "
                "that disk; free some or write elsewhere"
            )
