"""Merging neighbours: what a series says of any time stays true, and fewer points say it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd_service.control.store.thinning import Point, sampled, thin

VALUES = st.one_of(
    st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf, 1.7e308, -1.7e308])
)
SERIES = st.dictionaries(st.integers(1, 10**7), VALUES, min_size=1, max_size=300).map(
    lambda found: [sampled(at, step, found[at]) for step, at in enumerate(sorted(found))]
)


@given(points=SERIES, limit=st.integers(1, 50))
def test_what_is_thinned_counts_every_value_and_fits(points: list[Point], limit: int) -> None:
    found, span_ms = thin(points, 1, limit)
    assert len(found) <= limit
    for name in ("count", "nonfinite_count"):
        assert sum(getattr(p, name) for p in found) == sum(getattr(p, name) for p in points)
    finite = [p for p in points if p.count]
    assert min((p.min for p in found if p.count), default=None) == min(
        (p.min for p in finite), default=None
    )
    assert max((p.max for p in found if p.count), default=None) == max(
        (p.max for p in finite), default=None
    )
    assert max(p.step for p in found) == points[-1].step
    for point in found:
        within = [p for p in points if point.time_ms <= p.time_ms < point.end_ms]
        values = [p.mean for p in within if p.mean is not None]
        assert within, "a point for a time in which nothing was measured"
        assert (point.count, len(within)) == (len(values), point.count + point.nonfinite_count)
        if values:
            expected = math.fsum(value / len(values) for value in values)
            assert point.mean == pytest.approx(expected, rel=1e-9, abs=1e-6)
            assert point.min is not None
            assert point.max is not None
            assert point.min <= point.mean <= point.max
    assert len(points) <= limit or all(point.span_ms == span_ms for point in found)
