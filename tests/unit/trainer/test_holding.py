"""Holding: its states, its lease and its cap, by what rounds tell."""

import pytest

from paramd.memory.control_page import Word
from paramd.trainer.boundary.agreement import HOLD, STEP, Request, Round
from paramd.trainer.boundary.hold import Hold, HoldState, cap_s
from paramd.wire import MAX_LEASE_S

S = 1_000_000_000


class Bench:
    def __init__(self, cap_s: float = 100.0) -> None:
        self.words = [0] * 128
        self.now_ns = 1000 * S
        self.hold = Hold(self.words, cap_s=cap_s, clock_ns=lambda: self.now_ns)
        self.number = 0

    def agree(self, action: int, argument: int = 0, *, stay: bool = True) -> None:
        self.number += 1
        self.hold.update(Round(Request(self.number, 1, action, argument), stay))

    def lease(self, seconds: int) -> None:
        self.words[Word.HOLD_UNTIL_NS] = self.now_ns + seconds * S

    def state(self) -> tuple[HoldState, int]:
        return self.hold.state, self.words[Word.HOLD_STEPS_LEFT]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_hold_begins_when_agreed_whatever_ranks_said_before_it(bench: Bench) -> None:
    bench.lease(30)
    assert not bench.hold.stay()
    bench.agree(HOLD, stay=False)
    assert bench.state() == (HoldState.HELD, 0)
    assert bench.hold.stay()


def test_steps_pass_so_many_boundaries_and_hold_again(bench: Bench) -> None:
    bench.lease(30)
    bench.agree(HOLD)
    bench.agree(STEP, 2)
    assert bench.state() == (HoldState.STEPPING, 2)
    bench.hold.pass_boundary()
    assert bench.state() == (HoldState.STEPPING, 1)
    bench.hold.pass_boundary()
    assert bench.state() == (HoldState.HELD, 0)


def test_one_rank_that_does_not_want_to_stay_ends_it(bench: Bench) -> None:
    bench.agree(HOLD)
    bench.hold.update(Round(None, True))
    assert bench.state() == (HoldState.HELD, 0)
    bench.hold.update(Round(None, False))
    assert bench.state() == (HoldState.RUNNING, 0)


def test_a_step_that_is_agreed_as_the_lease_ends_steps_no_more(bench: Bench) -> None:
    bench.agree(HOLD)
    bench.agree(STEP, 3, stay=False)
    assert bench.state() == (HoldState.RUNNING, 0)


def test_the_lease_ends_when_nobody_renews_it(bench: Bench) -> None:
    bench.lease(30)
    bench.agree(HOLD)
    bench.now_ns += 29 * S
    assert bench.hold.stay()
    bench.lease(30)
    bench.now_ns += 29 * S
    assert bench.hold.stay()
    bench.now_ns += 2 * S
    assert not bench.hold.stay()


def test_no_renewal_outlives_the_cap_and_a_new_hold_begins_anew(bench: Bench) -> None:
    bench.lease(30)
    bench.agree(HOLD)
    bench.now_ns += 99 * S
    bench.lease(30)
    bench.agree(HOLD)
    assert bench.hold.stay()
    bench.now_ns += 2 * S
    assert not bench.hold.stay()
    bench.hold.update(Round(None, False))
    bench.agree(HOLD)
    assert bench.hold.stay()


@pytest.mark.parametrize(
    ("timeout_s", "found"),
    [(None, MAX_LEASE_S), (1800.0, MAX_LEASE_S), (300.0, 270.0), (20.0, 15.0), (3.0, 0.0)],
)
def test_the_cap_stays_below_the_collective_timeout(timeout_s: float | None, found: float) -> None:
    assert cap_s(timeout_s) == found
