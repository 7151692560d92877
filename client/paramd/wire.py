"""Wire bytes of messages that carry data, written without a protobuf object.

`ReadSnapshotResponse`, `SummonResponse` and `StageEditRequest` begin alike: data in field 1, its
XXH3 in field 2. One join copies the bytes once; a message object would copy them twice. Any
generated stub reads what is written here.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

CHUNK_BYTES = 2 << 20
"""Bytes of one message. 1 and 2 MiB were equally fast, 4 MiB slower (docs/decisions.md)."""

_DATA_TAG = b"\x0a"
_XXH3_TAG = b"\x11"
_OFFSET_TAG = b"\x18"
_FIXED64 = struct.Struct("<Q")


def data_chunk(data: memoryview, offset_bytes: int) -> bytes:
    """A ReadSnapshotResponse or StageEditRequest: data, XXH3, and their offset in field 3."""
    return b"".join((*_data_fields(data), _OFFSET_TAG, varint(offset_bytes)))


def summon_chunk(data: memoryview) -> bytes:
    """The SummonResponse that carries bytes of the tensor begun before."""
    return b"".join(_data_fields(data))


def _data_fields(data: memoryview) -> tuple[bytes | memoryview, ...]:
    checksum = _FIXED64.pack(xxh3_64_intdigest(data))
    return _DATA_TAG, varint(len(data)), data, _XXH3_TAG, checksum


def varint(value: int) -> bytes:
    """Base-128 varint of a number from 0 on."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
