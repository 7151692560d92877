"""Wire bytes of messages that carry data, written and read without a protobuf object.

`ReadSnapshotResponse`, `SummonResponse` and `StageEditRequest` begin alike: data in field 1, its
XXH3 in field 2. If a message has an offset, it seeds the XXH3, so bytes that arrive under another
offset fail the check. One join copies the bytes once; a message object would copy them twice.
Any generated stub can read these bytes; the parser has a fast path for this field order
and leaves anything else to protobuf.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from paramd.errors import DataLossError
from paramd.v1 import common_pb2, sidecar_pb2

CHUNK_BYTES = 2 << 20
"""Bytes per message. 1 and 2 MiB were equally fast, 4 MiB slower (docs/decisions.md)."""

LEASE_S = 30.0
"""Default lease of a snapshot or a pause, in seconds; renewed at a third of it."""

MAX_LEASE_S = 300.0
"""Longest lease of either, and longest pause, in seconds, whoever renews it."""

MAX_AGREE_S = 3600.0
"""Longest time for all ranks to agree on a pause."""

_DATA_TAG = b"\x0a"
_XXH3_TAG = b"\x11"
_OFFSET_TAG = b"\x18"
_FIXED64 = struct.Struct("<Q")
_MAX_SEED = (1 << 64) - 1


def data_chunk(data: memoryview, offset_bytes: int) -> bytes:
    """A ReadSnapshotResponse or StageEditRequest: data, XXH3, and their offset in field 3."""
    return b"".join((*_data_fields(data, offset_bytes), _OFFSET_TAG, varint(offset_bytes)))


def summon_chunk(data: memoryview) -> bytes:
    """A SummonResponse with more bytes of the tensor already begun."""
    return b"".join(_data_fields(data))


def checksum_of(data: bytes | memoryview, offset_bytes: int) -> int:
    """XXH3 (64 bit) of bytes that belong at an offset; any integer from the wire is accepted."""
    return xxh3_64_intdigest(data, seed=offset_bytes & _MAX_SEED)


def _data_fields(data: memoryview, offset_bytes: int = 0) -> tuple[bytes | memoryview, ...]:
    checksum = _FIXED64.pack(checksum_of(data, offset_bytes))
    return _DATA_TAG, varint(len(data)), data, _XXH3_TAG, checksum


def varint(value: int) -> bytes:
    """Base-128 varint of a non-negative number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`message[begin:end]` belongs at `offset_bytes` of the snapshot."""

    message: bytes
    begin: int
    end: int
    xxh3: int
    offset_bytes: int
    header: common_pb2.Header | None = None
    """Set only in the first chunk of a stream."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    @property
    def data(self) -> memoryview:
        """The bytes, without a copy."""
        return memoryview(self.message)[self.begin : self.end]

    @property
    def address(self) -> int:
        """Address of the first byte; valid while the chunk is referenced."""
        base = ctypes.cast(ctypes.c_char_p(self.message), ctypes.c_void_p).value
        assert base is not None
        return base + self.begin

    def check(self) -> None:
        """Verify the bytes and their offset against the checksum; DataLossError if they differ."""
        if checksum_of(self.data, self.offset_bytes) != self.xxh3:
            raise DataLossError(
                f"{self.size_bytes:,} bytes at offset {self.offset_bytes:,} do not match their "
                "checksum"
            )


def parse_chunk(message: bytes) -> Chunk:
    """Parse one `ReadSnapshotResponse`, copying nothing on the fast path."""
    chunk = _parse_known_order(message)
    if chunk is not None:
        return chunk
    parsed = sidecar_pb2.ReadSnapshotResponse.FromString(message)
    data = parsed.data
    header = parsed.header if parsed.HasField("header") else None
    return Chunk(data, 0, len(data), parsed.xxh3, parsed.offset_bytes, header)


def _parse_known_order(message: bytes) -> Chunk | None:
    try:
        if message[0] != _DATA_TAG[0]:
            return None
        size, begin = _varint(message, 1)
        end = begin + size
        if message[end] != _XXH3_TAG[0]:
            return None
        (xxh3,) = _FIXED64.unpack_from(message, end + 1)
        position = end + 1 + _FIXED64.size
        offset = 0
        if position < len(message) and message[position] == _OFFSET_TAG[0]:
            offset, position = _varint(message, position + 1)
        # Beyond 63 bits protobuf reads a negative number, and drops bits beyond 64.
        if position != len(message) or offset >> 63:
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
