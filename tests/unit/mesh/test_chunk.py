"""Chunks are read from their wire bytes, whoever wrote them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramd.v1 import sidecar_pb2
from paramd.wire import parse_chunk


@given(data=st.binary(max_size=300), xxh3=st.integers(0, 2**64 - 1), offset=st.integers(0, 2**62))
def test_wire_bytes_of_protobuf_are_understood(data: bytes, xxh3: int, offset: int) -> None:
    message = sidecar_pb2.ReadSnapshotResponse(data=data, xxh3=xxh3, offset_bytes=offset)
    chunk = parse_chunk(message.SerializeToString())
    assert (bytes(chunk.data), chunk.xxh3, chunk.offset_bytes) == (data, xxh3, offset)
    assert chunk.header is None
