"""Chunks are read from their wire bytes, whoever wrote them."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd.errors import DataLossError
from paramd.v1 import common_pb2, sidecar_pb2
from paramd.wire import checksum_of, parse_chunk


@given(data=st.binary(max_size=300), xxh3=st.integers(0, 2**64 - 1), offset=st.integers(0, 2**62))
def test_wire_bytes_of_protobuf_are_understood(data: bytes, xxh3: int, offset: int) -> None:
    message = sidecar_pb2.ReadSnapshotResponse(data=data, xxh3=xxh3, offset_bytes=offset)
    chunk = parse_chunk(message.SerializeToString())
    assert (bytes(chunk.data), chunk.xxh3, chunk.offset_bytes) == (data, xxh3, offset)
    assert chunk.header is None


def test_another_order_of_fields_is_understood() -> None:
    one = sidecar_pb2.ReadSnapshotResponse(offset_bytes=7, xxh3=5).SerializeToString()
    other = sidecar_pb2.ReadSnapshotResponse(data=b"abc").SerializeToString()
    chunk = parse_chunk(one + other)
    assert (bytes(chunk.data), chunk.xxh3, chunk.offset_bytes) == (b"abc", 5, 7)


def test_the_header_of_the_first_message_is_kept() -> None:
    header = common_pb2.Header(job="j", incarnation=2, step=9)
    chunk = parse_chunk(sidecar_pb2.ReadSnapshotResponse(header=header).SerializeToString())
    assert chunk.header == header
    assert chunk.size_bytes == 0


def test_the_address_is_that_of_the_data() -> None:
    message = sidecar_pb2.ReadSnapshotResponse(data=b"x" * 500, xxh3=1, offset_bytes=3)
    chunk = parse_chunk(message.SerializeToString())
    assert ctypes.string_at(chunk.address, chunk.size_bytes) == b"x" * 500


def test_a_flipped_bit_is_data_loss() -> None:
    data = bytes(range(200))
    message = sidecar_pb2.ReadSnapshotResponse(data=data, xxh3=checksum_of(data, 0))
    wire = bytearray(message.SerializeToString())
    parse_chunk(bytes(wire)).check()
    wire[50] ^= 1
    with pytest.raises(DataLossError, match="checksum"):
        parse_chunk(bytes(wire)).check()
