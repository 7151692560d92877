"""The framing of bulk streams: what is written is read, and nothing else is taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd import errors, streams
from paramd.errors import DataLossError, DeniedError, ParamdError
from paramd.streams import DATA, FAILED, LAST, Opening, Window

SECRET = bytes(range(32))
IDS = st.binary(min_size=streams.ID_BYTES, max_size=streams.ID_BYTES)
U64 = st.integers(0, 2**64 - 1)
OPENINGS = st.builds(
    lambda grant_id, ends, checksums: Opening(grant_id, *sorted(ends), checksums),
    IDS,
    st.tuples(U64, U64),
    st.booleans(),
)


@given(opening=OPENINGS)
def test_an_opening_is_read_as_it_was_written(opening: Opening) -> None:
    sealed = opening.sealed(SECRET)
    assert len(sealed) == streams.OPENING_BYTES
    found = streams.read_opening(sealed)
    assert found == opening
    found.check(sealed, SECRET)


@given(opening=OPENINGS, at=st.integers(0, streams.OPENING_BYTES - 1), bit=st.integers(0, 7))
def test_an_opening_with_any_bit_changed_is_refused(opening: Opening, at: int, bit: int) -> None:
    data = bytearray(opening.sealed(SECRET))
    data[at] ^= 1 << bit
    with pytest.raises((DataLossError, DeniedError)):
        streams.read_opening(bytes(data)).check(bytes(data), SECRET)


@pytest.mark.parametrize("size", [0, 1, streams.OPENING_BYTES - 1, streams.OPENING_BYTES + 1])
def test_an_opening_of_another_size_is_refused(size: int) -> None:
    sealed = Opening(bytes(16), 0, 1).sealed(SECRET) + b"x"
    with pytest.raises(DataLossError, match="opening of a stream"):
        streams.read_opening(sealed[:size])


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(DataLossError, match="not the opening"):
        streams.read_opening(Opening(bytes(16), 2, 1).sealed(SECRET))


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


@pytest.mark.parametrize("kind", errors.CODES)
def test_a_refusal_and_a_failure_tell_class_and_words(kind: type[ParamdError]) -> None:
    expected = errors.error_of_grpc(errors.codes_of(kind("")).grpc)
    told = streams.refusal(kind("wörds"))
    status, size = streams.read_reply(told[: streams.REPLY_BYTES], b"", SECRET)
    text = told[streams.REPLY_BYTES :]
    assert (size, text) == (len(text), "wörds".encode())
    failed = streams.failure(kind("wörds"))
    header = streams.read_window(failed[: streams.WINDOW_HEADER_BYTES])
    assert (header.kind, header.size) == (FAILED, len("wörds".encode()))
    for number in (status, header.xxh3):
        error = streams.error_of(number, text)
        assert (type(error), str(error)) == (expected, "wörds")


@given(
    one=st.one_of(
        st.builds(Window, st.just(DATA), U64, st.integers(1, streams.WINDOW_BYTES), U64),
        st.builds(Window, st.just(LAST), U64, st.just(0), U64),
        st.builds(Window, st.just(FAILED), U64, st.integers(0, streams.MAX_TEXT_BYTES), U64),
    )
)
def test_a_window_is_read_as_it_was_written(one: Window) -> None:
    assert streams.read_window(one.packed()) == one


def test_secrets_are_not_shown() -> None:
    from paramd.mesh.peers.sidecars import StreamOffer
    from paramd.v1 import common_pb2

    grant = streams.Grant(b"i" * 16, b"s" * 32)
    offer = StreamOffer(grant, common_pb2.Header(), "127.0.0.1", 1, None)
    assert "ssss" not in repr(grant)
    assert "ssss" not in repr(offer)
