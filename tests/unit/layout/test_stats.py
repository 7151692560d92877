"""Merged statistics equal those of all elements at once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paramd.layout.stats import COLUMNS, EMPTY, Columns, Stats, merge_all, summarize


def stats_of(values: list[float], begin: int = -8, bins: int = 16) -> Stats:
    """Straight from the definitions."""
    finite = [value for value in values if math.isfinite(value)]
    mean = math.fsum(finite) / len(finite) if finite else 0.0
    counts = [0] * bins
    for value in finite:
        if value:
            counts[min(max(math.frexp(value)[1] - 1 - begin, 0), bins - 1)] += 1
    return Stats(
        count=len(values), zero_count=values.count(0.0), nan_count=sum(map(math.isnan, values)),
        inf_count=sum(map(math.isinf, values)), mean=mean,
        m2=math.fsum((value - mean) ** 2 for value in finite),
        sum_squares=math.fsum(value * value for value in finite), min=min(finite, default=math.inf),
        max=max(finite, default=-math.inf), exponent_counts=tuple(counts), exponent_begin=begin,
    )  # fmt: skip


def assert_close(one: Stats, other: Stats) -> None:
    for field in ("count", "zero_count", "nan_count", "inf_count", "min", "max"):
        assert getattr(one, field) == getattr(other, field), field
    assert one.exponent_counts == other.exponent_counts
    scale = max(abs(one.min), abs(one.max), 1.0) if one.finite_count else 1.0
    assert one.mean == pytest.approx(other.mean, rel=1e-9, abs=1e-12 * scale)
    assert one.m2 == pytest.approx(other.m2, rel=1e-6, abs=1e-9 * scale * scale)
    assert one.sum_squares == pytest.approx(other.sum_squares, rel=1e-9)


values = st.lists(
    st.floats(-1e3, 1e3) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf]), max_size=20
)


@given(parts=st.lists(values, max_size=5))
def test_parts_merge_to_the_whole(parts: list[list[float]]) -> None:
    whole = [value for part in parts for value in part]
    merged = merge_all(map(stats_of, [*parts, []]))
    assert_close(merged, stats_of(whole))
    columns = Columns(2)
    for part in map(stats_of, parts):
        columns.add([1], [[getattr(part, name)] for name in COLUMNS])
    assert list(columns) == [EMPTY, merged._replace(exponent_counts=(), exponent_begin=0)]


def test_histograms_with_other_bins_keep_their_exponents() -> None:
    parts = stats_of([1.0, 2.0], begin=0, bins=3), stats_of([0.25, 2.0], begin=-3, bins=5)
    merged = merge_all(parts)
    assert merged.exponent_begin == -3
    assert merged.exponent_counts == (0, 1, 0, 1, 2, 0)


@given(part=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=30))
def test_summaries_are_what_torch_says(part: list[float]) -> None:
    tensor = torch.tensor(part, dtype=torch.float64)
    summary = summarize(merge_all((stats_of(part[:1]), stats_of(part[1:]))))
    assert summary.norm == pytest.approx(tensor.norm().item(), rel=1e-9)
    assert summary.mean == pytest.approx(tensor.mean().item(), rel=1e-9, abs=1e-9)
    assert summary.std == pytest.approx(tensor.std().item(), rel=1e-6, abs=1e-6)
    assert (summary.min, summary.max) == (tensor.min().item(), tensor.max().item())


def test_summaries_of_nothing_have_no_numbers() -> None:
    summary = summarize(EMPTY)
    assert summary.count == 0
    assert summary.norm == 0.0
    assert summary.exponents == ()
    assert all(map(math.isnan, (summary.mean, summary.std, summary.min, summary.max)))
    assert math.isnan(summarize(stats_of([2.0])).std)
