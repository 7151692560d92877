"""Slow ranks by the time that others wait for them: simulated samples, with chance in them."""

import random
from collections.abc import Callable

import pytest

from paramd_service.alerts.looks import EVERY_S, HURRY_S, MAX_HURRIED, Slow, Waits
from paramd_service.control.mesh.evidence import Evidence

Look = Callable[[float, random.Random], list[Evidence]]


def at(rank: int, kind: str, at_s: float, step_s: float = 0.5) -> Evidence:
    step = int(at_s / step_s)
    return Evidence(
        rank=rank, kind=kind, what=f"in {kind}", step=step, boundary_age_s=at_s - step * step_s
    )


def steps(slower: float, jitter: float = 0.05, step_s: float = 0.5) -> Look:
    """Two ranks, the second of which takes so many times as long for its part of a step; each is
    waited for by chance, too."""

    def look(now_s: float, chance: random.Random) -> list[Evidence]:
        part = (slower - 1) / slower
        roll = chance.random()
        if roll < part or roll > 1 - jitter:
            return [at(0, "collective", now_s, step_s), at(1, "code", now_s, step_s)]
        if roll > 1 - 2 * jitter:
            return [at(0, "code", now_s, step_s), at(1, "collective", now_s, step_s)]
        kind = chance.choice(("forward", "backward", "optimizer"))
        return [at(0, kind, now_s, step_s), at(1, kind, now_s, step_s)]

    return look


def first_told(look: Look, until_s: float, seed: int) -> tuple[float, Slow] | None:
    """When something is told, with samples as the watch takes them."""
    chance, waits, now_s, hurried = random.Random(seed), Waits(), 0.0, 0
    while now_s < until_s:
        seen = look(now_s, chance)
        waits.take(seen, now_s)
        if (slow := waits.slow([one.rank for one in seen])) is not None:
            return now_s, slow
        hurry = waits.suspicious and hurried < MAX_HURRIED
        hurried = hurried + 1 if hurry else 0
        now_s += (HURRY_S if hurry else EVERY_S) * (0.75 + 0.5 * chance.random())
    return None


@pytest.mark.parametrize("slower", [1.3, 3.0])
def test_a_slow_rank_is_told_within_a_minute(slower: float) -> None:
    found = [first_told(steps(slower), 60.0, seed) for seed in range(20)]
    assert sum(one is not None for one in found) >= 19
    assert all(one is None or one[1].ranks == (1,) for one in found)


def test_equal_ranks_on_a_busy_machine_are_not_told_of() -> None:
    for jitter in (0.02, 0.1, 0.15):
        found = [first_told(steps(1.0, jitter), 180.0, seed) for seed in range(10)]
        assert found == [None] * 10, jitter


def meeting(seed: int, rank: Callable[[random.Random], float], step_s: float) -> Look:
    """Two ranks that meet at the end of each step, the second of which takes `rank` times as long
    for its part of it. Samples must come in order."""
    chance = random.Random(seed)
    begin_s, times, step = 0.0, (step_s, step_s * rank(chance)), 0

    def look(now_s: float, _: random.Random) -> list[Evidence]:
        nonlocal begin_s, times, step
        while now_s >= begin_s + max(times) + 0.1 * step_s:
            begin_s, step = begin_s + max(times) + 0.1 * step_s, step + 1
            times = (step_s, step_s * rank(chance))
        age_s = now_s - begin_s
        kinds = ["forward" if age_s < one else "collective" for one in times]
        if age_s >= max(times):
            kinds = ["optimizer"] * 2
        return [
            Evidence(rank=rank, kind=kind, what=kind, step=step, boundary_age_s=age_s)
            for rank, kind in enumerate(kinds)
        ]

    return look


@pytest.mark.parametrize(
    "jitter",
    [
        pytest.param(lambda chance: chance.gauss(1.0, 0.2), id="a fifth each way"),
        pytest.param(lambda chance: chance.uniform(1.0, 1.2), id="up to a fifth longer"),
    ],
)
@pytest.mark.parametrize("step_s", [0.1, 0.5])
def test_a_rank_whose_steps_vary_by_a_fifth_is_not_told_of(
    jitter: Callable[[random.Random], float], step_s: float
) -> None:
    found = [first_told(meeting(seed, jitter, step_s), 180.0, seed) for seed in range(6)]
    assert found == [None] * 6


@pytest.mark.parametrize("step_s", [0.1, 0.5, 2.0])
def test_a_rank_that_is_slow_in_each_step_is_told_within_a_minute(step_s: float) -> None:
    found = [
        first_told(meeting(seed, lambda chance: chance.gauss(1.3, 0.05), step_s), 60.0, seed)
        for seed in range(10)
    ]
    assert sum(one is not None for one in found) >= 9
    assert all(one is None or one[1].ranks == (1,) for one in found)


def test_the_usual_time_of_a_step_does_not_depend_on_how_often_it_is_looked_at() -> None:
    look, waits, now_s, chance = meeting(1, lambda _: 1.0, 4.0), Waits(), 0.0, random.Random(1)
    while now_s < 60.0:
        waits.take(look(now_s, chance), now_s)
        now_s += HURRY_S
    assert waits.step_s() == pytest.approx(4.4)


def test_an_evaluation_of_one_rank_does_not_count() -> None:
    """It comes every minute and takes twenty seconds, in which the other waits."""

    def look(now_s: float, chance: random.Random) -> list[Evidence]:
        if now_s % 60.0 < 40.0:
            return steps(1.0)(now_s, chance)
        age_s = now_s % 60.0 - 40.0
        both = [at(0, "code", now_s), at(1, "collective", now_s)]
        return [
            Evidence(rank=one.rank, kind=one.kind, what=one.what, step=80, boundary_age_s=age_s)
            for one in both
        ]

    assert [first_told(look, 300.0, seed) for seed in range(10)] == [None] * 10


def data(share: float, ranks: tuple[int, ...]) -> Look:
    def look(now_s: float, chance: random.Random) -> list[Evidence]:
        if chance.random() < share:
            kinds = ["dataloader" if rank in ranks else "collective" for rank in (0, 1)]
        else:
            kinds = [chance.choice(("forward", "backward"))] * 2
        return [at(rank, kind, now_s) for rank, kind in enumerate(kinds)]

    return look


def test_data_that_starves_all_or_one_is_told_and_a_burst_is_not() -> None:
    starved = first_told(data(0.75, (0, 1)), 60.0, 1)
    assert starved is not None
    assert starved[1].ranks == (0, 1)
    one = first_told(data(0.6, (1,)), 60.0, 1)
    assert one is not None
    assert one[1].ranks == (1,)
    assert "in dataloader" in one[1].text


def test_what_makes_a_rank_late_is_told_also_where_most_of_a_step_is_something_else() -> None:
    """Of ten samples rank 1 is alone in four, twice in its forward, as all are most of the time."""

    def look(now_s: float, chance: random.Random) -> list[Evidence]:
        turn = chance.randrange(10)
        if turn < 4:
            kind = "dataloader" if turn < 2 else "forward"
            return [at(0, "collective", now_s), at(1, kind, now_s)]
        return [at(rank, "forward", now_s) for rank in (0, 1)]

    for seed in range(5):
        found = first_told(look, 60.0, seed)
        assert found is not None
        assert "in dataloader" in found[1].text

    assert [first_told(data(0.2, (0, 1)), 300.0, seed) for seed in range(10)] == [None] * 10
