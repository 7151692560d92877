"""A chunk of a snapshot, read from its wire bytes without a protobuf object.

A protobuf object would copy the data once more. The parser takes the order that
`ReadSnapshotResponse` is written in (data, xxh3, offset_bytes); anything else goes to the
protobuf parser, so any server's bytes are understood.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import xxhash

from paramd.errors import DataLossError
from paramd.v1 import common_pb2, sidecar_pb2

_DATA_TAG = 0x0A
_XXH3_TAG = 0x11
_OFFSET_TAG = 0x18
_FIXED64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Chunk:
    """`message[begin:end]` belongs at `offset_bytes` of the snapshot."""

    message: bytes
    begin: int
    end: int
    xxh3: int
    offset_bytes: int
    header: common_pb2.Header | None = None
    """Set in the first chunk of a stream only."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    @property
    def data(self) -> memoryview:
        """The bytes, without a copy."""
        return memoryview(self.message)[self.begin : self.end]

    @property
    def address(self) -> int:
        """Address of the first byte; good as long as the chunk is held."""
        base = ctypes.cast(ctypes.c_char_p(self.message), ctypes.c_void_p).value
        assert base is not None
        return base + self.begin

    def check(self) -> None:
        """Compares the checksum.

        Raises:
            DataLossError: the bytes are not those that were sent.
        """
        if xxhash.xxh3_64_intdigest(self.data) != self.xxh3:
            raise DataLossError(
                f"{self.size_bytes:,} bytes at offset {self.offset_bytes:,} do not match their "
                "checksum"
            )


def parse_chunk(message: bytes) -> Chunk:
    """The chunk in one `ReadSnapshotResponse`. Nothing is copied."""
    chunk = _parse_known_order(message)
    return chunk if chunk is not None else _parse_any_order(message)


def _parse_known_order(message: bytes) -> Chunk | None:
    try:
        if message[0] != _DATA_TAG:
            return None
        size, begin = _varint(message, 1)
        end = begin + size
        if message[end] != _XXH3_TAG:
            return None
        (xxh3,) = _FIXED64.unpack_from(message, end + 1)
        position = end + 1 + _FIXED64.size
        offset = 0
        if position < len(message) and message[position] == _OFFSET_TAG:
            offset, position = _varint(message, position + 1)
        if position != len(message):
            return None
    except (IndexError, struct.error):
        return None
    return Chunk(message, begin, end, xxh3, offset)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError("a varint has at most ten bytes")


def _parse_any_order(message: bytes) -> Chunk:
    parsed = sidecar_pb2.ReadSnapshotResponse.FromString(message)
    data = parsed.data
    header = parsed.header if parsed.HasField("header") else None
    return Chunk(data, 0, len(data), parsed.xxh3, parsed.offset_bytes, header)
