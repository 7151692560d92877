"""Writes a safetensors file tensor by tensor; it appears under its name when it is whole.

    with SafetensorsWriter(path, specs, metadata={"format": "pt"}) as writer:
        for spec in writer.specs:          # in file order
            for chunk in ...:
                writer.append(chunk)

Never holds more than one chunk. The format: eight bytes of header length, a JSON header,
the bytes of all tensors one after the other. Source: huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from paramd.errors import ConflictError, ExhaustedError, UsageError
from paramd.layout.dtypes import item_bytes, safetensors_name

MAX_HEADER_BYTES = 100_000_000
"""Longer headers are refused by the readers."""

_METADATA = "__metadata__"
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What the header says of one tensor; `dtype` as torch names it, without its prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)


class SafetensorsWriter:
    """A file under way. Everything is written beside it and moved there at the end.

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
            replace: whether a file of that name may be overwritten.

        Raises:
            UsageError: a name twice, a dtype that the format has not, too long a header.
        """
        self.path = path
        # As the reference writer does: wide elements first, so that every tensor is aligned.
        self.specs = sorted(specs, key=lambda spec: -item_bytes(spec.dtype))
        self._header = encode_header(self.specs, metadata)
        self.size_bytes = len(self._header) + sum(spec.size_bytes for spec in specs)
        self._replace = replace
        self._part = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
        self._file: BinaryIO | None = None

    def __enter__(self) -> SafetensorsWriter:
        """Opens the file beside and writes the header.

        Raises:
            ConflictError: the name is taken and may not be replaced.
            ExhaustedError: the disk has not the room.
        """
        self._check_free()
        self._check_room()
        # Not mkstemp: the file shall have the mode that the user's umask says.
        self._file = self._part.open("xb")
        self._file.write(self._header)
        return self

    def append(self, chunk: bytes | bytearray | memoryview) -> None:
        """Writes the next bytes, row-major little-endian, of the tensors in file order."""
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
                os.link(self._part, self.path)
            except FileExistsError:
                self._refuse()
            except OSError:
                # A file system without hard links.
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


def encode_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON header, padded so that the data begins aligned.

    Raises:
        UsageError: a name twice or reserved, a dtype that the format has not, too long.
    """
    twice = [name for name, times in Counter(s.name for s in specs).items() if times > 1]
    if twice or any(spec.name == _METADATA for spec in specs):
        raise UsageError(f"tensor name {(twice or [_METADATA])[0]!r} can stand there only once")
    header: dict[str, object] = {_METADATA: dict(metadata)}
    begin = 0
    for spec in specs:
        end = begin + spec.size_bytes
        header[spec.name] = {
            "dtype": safetensors_name(spec.dtype),
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the header of {len(specs):,} tensors takes {len(text):,} bytes; readers take "
            f"{MAX_HEADER_BYTES:,}; write fewer tensors into one file"
        )
    return len(text).to_bytes(8, "little") + text
