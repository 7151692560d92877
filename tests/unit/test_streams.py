"""The framing of bulk streams: what is written is read, and nothing else is taken for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd import streams
from paramd.errors import DataLossError, DeniedError
from paramd.streams import Opening

SECRET = bytes(range(32))
IDS = st.binary(min_size=streams.ID_BYTES, max_size=streams.ID_BYTES)
U64 = st.integers(0, 2**64 - 1)
OPENINGS = st.builds(
    lambda grant_id, ends, checksums: Opening(grant_id, *sorted(ends), checksums),
    IDS,
    st.tuples(U64, U64),
    st.booleans(),
)


@given(opening=OPENINGS, at=st.integers(0, streams.OPENING_BYTES - 1), bit=st.integers(0, 7))
def test_an_opening_with_any_bit_changed_is_refused(opening: Opening, at: int, bit: int) -> None:
    data = bytearray(opening.sealed(SECRET))
    data[at] ^= 1 << bit
    with pytest.raises((DataLossError, DeniedError)):
        streams.read_opening(bytes(data)).check(bytes(data), SECRET)


@given(opening=OPENINGS, at=st.integers(0, streams.REPLY_BYTES - 1), bit=st.integers(0, 7))
def test_an_accepting_reply_is_good_for_its_opening_and_unchanged(
    opening: Opening, at: int, bit: int
) -> None:
    sealed = opening.sealed(SECRET)
    data = bytearray(streams.reply(sealed, SECRET))
    assert len(data) == streams.REPLY_BYTES
    assert streams.read_reply(bytes(data), sealed, SECRET) == (0, 0)
    for other, secret in ((sealed[::-1], SECRET), (sealed, SECRET[::-1])):
        with pytest.raises(DataLossError, match="does not know the grant"):
            streams.read_reply(bytes(data), other, secret)
    data[at] ^= 1 << bit
    try:
        status, _ = streams.read_reply(bytes(data), sealed, SECRET)
    except DataLossError:
        return
    assert status, "a changed reply may refuse, never accept"


def test_secrets_are_not_shown() -> None:
    from paramd.mesh.peers.sidecars import StreamOffer
    from paramd.v1 import common_pb2

    grant = streams.Grant(b"i" * 16, b"s" * 32)
    offer = StreamOffer(grant, common_pb2.Header(), "127.0.0.1", 1, None)
    assert "ssss" not in repr(grant)
    assert "ssss" not in repr(offer)
