"""Wire bytes of ReadSnapshotResponse and SummonResponse, written without an object.

Fields 1 (data) and 2 (xxh3) are the same in both messages; field 3 of ReadSnapshotResponse
is the offset. One join copies the bytes once; a message object would copy them twice. Any
generated stub reads what is written here (tests/unit/sidecar/test_chunk.py).
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

CHUNK_BYTES = 2 << 20
"""Bytes of one message. 1 and 2 MiB were equally fast, 4 MiB slower (docs/decisions.md)."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # The largest that HTTP/2 has: fewer frames for the same bytes.
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # Two sidecars must never share a port.
    ("grpc.so_reuseport", 0),
    # A peer that stopped is noticed, and dead connections go.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 10),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_metadata_size", 16 << 10),
)

_DATA_TAG = b"\x0a"
_XXH3_TAG = b"\x11"
_OFFSET_TAG = b"\x18"
_FIXED64 = struct.Struct("<Q")


def read_chunk(snapshot: memoryview, begin: int, end: int) -> bytes:
    """The message that carries snapshot bytes [begin, end)."""
    return b"".join((*_data_fields(snapshot[begin:end]), _OFFSET_TAG, varint(begin)))


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
