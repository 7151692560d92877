"""Merging neighbours: what a series says of any time stays true, and fewer points say it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd_service.control.store.thinning import Point, merge, sampled, thin

VALUES = st.one_of(
    st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf, 1.7e308, -1.7e308])
)
SERIES = st.dictionaries(st.integers(1, 10**7), VALUES, min_size=1, max_size=300).map(
    lambda found: [sampled(at, step, found[at]) for step, at in enumerate(sorted(found))]
)


def test_neighbours_within_a_span_become_one_and_the_others_stay() -> None:
    points = [sampled(at, at, value) for at, value in ((4, 1.0), (6, 3.0), (7, math.nan), (9, 8.0))]
    assert merge(points, 4) == [
        Point(time_ms=4, span_ms=4, step=7, mean=2.0, min=1.0, max=3.0, count=2, nonfinite_count=1),
        Point(time_ms=8, span_ms=4, step=9, mean=8.0, min=8.0, max=8.0, count=1, nonfinite_count=0),
    ]


def test_a_point_of_a_coarser_grid_keeps_its_own_span_until_others_are_merged_with_it() -> None:
    minute = Point(
        time_ms=60_000, span_ms=60_000, mean=1.0, min=1.0, max=1.0, count=60, nonfinite_count=0
    )
    assert merge([minute, sampled(120_500, 0, 1.0)], 1024)[0] == minute
    (both,) = merge([minute, sampled(120_500, 0, 1.0)], 131_072)
    assert (both.time_ms, both.span_ms, both.count) == (0, 131_072, 61)


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


@given(points=SERIES)
def test_thinning_twice_is_thinning_at_once(points: list[Point]) -> None:
    once, span_ms = thin(points, 1, 8)
    first, between_ms = thin(points, 1, 60)
    twice, again_ms = thin(first, between_ms, 8)
    assert again_ms == span_ms

    def shape(found: Sequence[Point]) -> list[object]:
        return [(p.time_ms, p.span_ms, p.count, p.nonfinite_count, p.min, p.max) for p in found]

    assert shape(twice) == shape(once)
