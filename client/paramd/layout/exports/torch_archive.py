"""The bytes around a tensor's data in a file for `torch.load(weights_only=True)`. Pure.

A torch file is a zip archive of stored records: a short pickle (opcodes that only call torch's
own rebuild function), the byte order, a version, and the data. We emit those few opcodes
ourselves, so nothing here can pickle an object, and torch is not needed.

    archive = TorchArchive("float32", (2, 3))
    archive.before + data + archive.after(crc32(data))

Source: pytorch/pytorch: torch/serialization.py, caffe2/serialize/inline_container.h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from zlib import crc32

from paramd.errors import UsageError
from paramd.layout.dtypes import DTYPES, item_bytes
from paramd.layout.types import row_major

_ALIGNMENT_BYTES = 64
_STREAMED = 0x0808  # sizes and checksum come after the data; names are UTF-8
_STORED = 0x0800
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR = struct.Struct("<4sIII")
_END = struct.Struct("<4sHHHHIIH")
_DATE = 0x21  # 1980-01-01: the bytes must not depend on the time


@dataclass(frozen=True, slots=True)
class _Record:
    name: bytes
    flags: int
    checksum: int
    size_bytes: int
    begin_bytes: int

    def central(self, checksum: int) -> bytes:
        return (
            _CENTRAL.pack(
                b"PK\x01\x02",
                0,
                0,
                self.flags,
                0,
                0,
                _DATE,
                checksum,
                self.size_bytes,
                self.size_bytes,
                len(self.name),
                0,
                0,
                0,
                0,
                0,
                self.begin_bytes,
            )
            + self.name
        )


class TorchArchive:
    """One dense row-major tensor. `before`, the data, and `after` make up the file."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.data_bytes = prod(shape) * item_bytes(dtype)
        if self.data_bytes >= 1 << 31:
            raise UsageError(f"{self.data_bytes:,} bytes are too many for one archive; cut it")
        self._records: list[_Record] = []
        before = bytearray()
        self._append(before, b"archive/data.pkl", _description(dtype, shape))
        self._append(before, b"archive/version", b"3\n")
        self._append(before, b"archive/byteorder", b"little")
        name = b"archive/data/0"
        begin = len(before)
        extra = _padding(begin + _LOCAL.size + len(name))
        before += _local(name, _STREAMED, 0, 0, len(extra)) + name + extra
        self._records.append(_Record(name, _STREAMED, 0, self.data_bytes, begin))
        self.before = bytes(before)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole archive."""
        central = sum(_CENTRAL.size + len(record.name) for record in self._records)
        return len(self.before) + self.data_bytes + _DESCRIPTOR.size + central + _END.size

    def after(self, checksum: int) -> bytes:
        """The bytes after the data; `checksum` is the data's zlib.crc32."""
        size = self.data_bytes
        descriptor = _DESCRIPTOR.pack(b"PK\x07\x08", checksum, size, size)
        *small, data = self._records
        central = b"".join(record.central(record.checksum) for record in small)
        central += data.central(checksum)
        count = len(self._records)
        begin = len(self.before) + size + len(descriptor)
        end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(central), begin, 0)
        return descriptor + central + end

    def _append(self, before: bytearray, name: bytes, content: bytes) -> None:
        checksum = crc32(content)
        self._records.append(_Record(name, _STORED, checksum, len(content), len(before)))
        before += _local(name, _STORED, checksum, len(content), 0) + name + content


@lru_cache(maxsize=1024)
def torch_archive(dtype: str, shape: tuple[int, ...]) -> TorchArchive:
    """The archive of such a tensor, cached: the layers of a model are alike."""
    return TorchArchive(dtype, shape)


def _local(name: bytes, flags: int, checksum: int, size_bytes: int, extra_bytes: int) -> bytes:
    return _LOCAL.pack(
        b"PK\x03\x04",
        20,
        flags,
        0,
        0,
        _DATE,
        checksum,
        size_bytes,
        size_bytes,
        len(name),
        extra_bytes,
    )


def _padding(begin_bytes: int) -> bytes:
    """An extra field that aligns what follows it."""
    size = -(begin_bytes + 4) % _ALIGNMENT_BYTES
    return b"FB" + size.to_bytes(2, "little") + b"Z" * size


def _description(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Opcodes: rebuild a tensor of this shape on record "0"."""
    storage = DTYPES[dtype].storage
    typed = bool(storage)
    parts = [
        b"\x80\x02",
        _global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"),
        b"((",
        _text("storage"),
        _global("torch", storage) if storage else _global("torch.storage", "UntypedStorage"),
        _text("0"),
        _text("cpu"),
        _number(prod(shape) if typed else prod(shape) * item_bytes(dtype)),
        b"tQ",
        _number(0),
        _tuple(shape),
        _tuple(row_major(shape)),
        b"\x89",
        _global("collections", "OrderedDict"),
        b")R",
        b"" if typed else _global("torch", dtype),
        b"tR.",
    ]
    return b"".join(parts)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(value: int) -> bytes:
    if value < 256:
        return b"K" + bytes([value])
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(9, "little")
    return b"\x8a\x09" + encoded


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(_number(value) for value in values) + b"t" if values else b")"
