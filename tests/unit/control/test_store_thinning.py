"""What is summed up and dropped when, with a clock of our own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd_service.control.store.retention import (
    GRACE_S,
    TIERS,
    Drop,
    RollUp,
    Tier,
    plan,
    tier_for,
)

HOUR, DAY = 3600, 86_400


def test_nothing_is_done_without_points() -> None:
    assert plan(1e9, {}, {}) == []


def test_a_minute_is_summed_up_once_it_is_over_and_the_grace_too() -> None:
    assert plan(6060 + GRACE_S - 1, {}, {0: 6000}) == []
    assert plan(6060 + GRACE_S, {}, {0: 6000}) == [RollUp(0, 60, 6000, 6060)]
    assert plan(6060 + GRACE_S, {60: 6060}, {0: 6000}) == []


def test_ten_minutes_are_summed_up_from_finished_minutes_only() -> None:
    now_s = 6600 + GRACE_S
    assert plan(now_s, {60: 6540}, {0: 6000, 60: 6000}) == [
        RollUp(0, 60, 6540, 6600),
        RollUp(60, 600, 6000, 6600),
    ]
    assert plan(now_s - 60, {60: 6480}, {0: 6000, 60: 6000}) == [RollUp(0, 60, 6480, 6540)]


def test_samples_are_dropped_after_an_hour_minutes_after_a_day_the_rest_after_30_days() -> None:
    now_s = 40 * DAY
    oldest = {0: now_s - HOUR - 60, 60: now_s - DAY - 60, 600: now_s - 30 * DAY - 600}
    rolled = {60: now_s - 60, 600: now_s - 600}
    drops = [step for step in plan(now_s, rolled, oldest) if isinstance(step, Drop)]
    assert drops == [
        Drop(0, now_s - HOUR),
        Drop(60, now_s - DAY),
        Drop(600, now_s - 30 * DAY),
    ]


def test_nothing_is_dropped_before_its_sum_is_written() -> None:
    """After two days away the samples are still there; one hour of them is summed up a time."""
    begin_s, now_s = 40 * DAY, 42 * DAY
    steps = plan(now_s, {}, {0: begin_s})
    assert steps == [RollUp(0, 60, begin_s, begin_s + HOUR), Drop(0, begin_s + HOUR)]


def test_a_clock_that_went_back_does_nothing() -> None:
    now_s = 40 * DAY
    assert plan(now_s - DAY, {60: now_s, 600: now_s}, {0: now_s, 60: now_s, 600: now_s}) == []


@given(
    begin_s=st.integers(10**9, 10**9 + 10_000),
    pauses_s=st.lists(st.integers(1, 4000), min_size=1, max_size=60),
)
def test_every_sample_is_summed_up_exactly_once_before_it_goes(
    begin_s: int, pauses_s: list[int]
) -> None:
    """A sample every second; sweeps at arbitrary times."""
    now_s, rolled, oldest_raw = begin_s, {}, begin_s
    done_s = begin_s // 60 * 60
    for pause_s in pauses_s:
        now_s += pause_s
        for step in plan(now_s, rolled, {0: oldest_raw}):
            if isinstance(step, RollUp) and step.target_s == 60:
                assert step.begin_s == done_s
                assert (step.end_s - step.begin_s) % 60 == 0
                assert step.end_s <= now_s - GRACE_S
                done_s = rolled[60] = step.end_s
            if isinstance(step, Drop):
                assert step.resolution_s == 0
                assert step.before_s <= min(done_s, now_s - HOUR)
                oldest_raw = max(oldest_raw, step.before_s)


@pytest.mark.parametrize(
    ("age_s", "tier"),
    [(0, 0), (HOUR, 0), (HOUR + 1, 1), (DAY, 1), (DAY + 1, 2), (300 * DAY, 2)],
)
def test_reading_takes_the_finest_tier_that_still_has_the_time(age_s: int, tier: int) -> None:
    assert tier_for(1e9 - age_s, 1e9) is TIERS[tier]


def test_each_resolution_is_a_multiple_of_the_one_before_and_kept_longer() -> None:
    for finer, coarser in itertools.pairwise(TIERS):
        assert isinstance(finer, Tier)
        assert coarser.resolution_s % max(finer.resolution_s, 1) == 0
        assert coarser.keep_s > finer.keep_s
