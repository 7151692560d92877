"""A read is cut into streams only where no place has bytes on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd.mesh.reading import transfer
from paramd.mesh.reading.places import Place
from paramd.mesh.reading.transfer import _cut

SIZE = 1000
SPANS = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(1, 200)).map(
        lambda one: (one[0], min(sum(one), SIZE))
    ),
    max_size=30,
)


@given(spans=SPANS, count=st.integers(1, 6), least=st.integers(1, 300))
def test_parts_cover_the_read_and_no_place_straddles_two(
    spans: list[tuple[int, int]], count: int, least: int
) -> None:
    places = [Place(begin, end, address=1) for begin, end in sorted(spans)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "STREAM_LEAST_BYTES", least)
        parts = _cut(places, SIZE, count)
    assert 1 <= len(parts) <= count
    assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
    assert parts[-1][1] == SIZE
    assert [place for _, _, held in parts for place in held] == places
    for begin, end, held in parts:
        assert all(begin <= place.begin and place.end <= end for place in held)
    assert all(end - begin >= least for begin, end, _ in parts[:-1])
