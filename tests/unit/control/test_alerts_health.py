"""The verdict: the worst first, and never ok where nobody looked."""

from dataclasses import replace

import pytest

from paramd.mesh.edits.calls import PauseWord
from paramd.mesh.insight.reports import Alert
from paramd_service.alerts.costs import Spent
from paramd_service.alerts.health import verdict_of
from paramd_service.alerts.pace import (
    CREDIT_S,
    HURRY_S,
    LAST,
    LONGEST_S,
    PROBE_S,
    QUICK_COUNT,
    REPAYING,
    USUAL_S,
    Pace,
)
from paramd_service.control.mesh.health import Seen, Verdict, Watch, WatchState
from paramd_service.control.mesh.registry import State

ON = Watch(what="values", state=WatchState.ON, every_s=40.0, age_s=12.0)
OFF = Watch(what="values", state=WatchState.OFF)


def alert(rule: str, severity: str, first_seen_s: float, **changes: object) -> Alert:
    told: dict[str, object] = {
        "id": f"run-1-{int(first_seen_s)}-0", "job": "run", "incarnation": 1, "rule": rule,
        "subject": rule, "severity": severity, "state": "firing", "reason": f"{rule} found",
        "ranks": (), "name": "", "step": 7, "first_seen_s": first_seen_s, "last_seen_s": 9.0,
        "resolved_s": None,
    }  # fmt: skip
    return Alert(**(told | changes))  # type: ignore[arg-type]


def verdict(*firing: Alert, watches: tuple[Watch, ...] = (ON,), **changes: object) -> Verdict:
    usual: dict[str, object] = {"state": State.OK, "reason": "", "pause": PauseWord.RUNNING}
    seen = Seen(**(usual | changes))  # type: ignore[arg-type]
    return verdict_of(seen, firing=firing, watches=watches, tells_of_late=True)


def test_ok_says_what_was_looked_at_and_when() -> None:
    found = verdict()
    assert (found.word, found.level, found.why) == ("ok", "ok", "")
    assert "values checked every 40 s, last 12 s ago" in found.line


@pytest.mark.parametrize(
    ("watches", "said"),
    [
        ((OFF,), "values are not watched: paramd watch on turns it on"),
        ((replace(OFF, detail="look = false"),), "values are not watched (look = false)"),
        ((), "nothing is watched yet"),
        ((Watch(what="values", state=WatchState.FAILING, detail="gone"),), "could not be checked"),
        (
            (Watch(what="values", state=WatchState.ON, every_s=40.0),),
            "are not checked yet (every 40 s)",
        ),
        ((replace(ON, age_s=301.0),), "values were last checked 5 min ago"),
        ((replace(ON, every_s=8685.0, age_s=3e4),), "values were last checked 8 h 20 min ago"),
    ],
)
def test_where_nobody_looked_it_is_not_ok(watches: tuple[Watch, ...], said: str) -> None:
    found = verdict(watches=watches)
    assert (found.word, found.level) == ("running", "info")
    assert said in found.line
    # What a setting keeps off is not turned on by a command.
    assert ("paramd watch on" in found.line) == (watches == (OFF,))


def test_the_worst_is_the_first_line_and_not_the_oldest() -> None:
    found = verdict(
        alert("straggler", "warning", 1.0, ranks=(2,)),
        alert("gradient-jump", "warning", 2.0, name="layers.0.weight"),
        alert("logged-number", "critical", 3.0),
        alert("non-finite", "critical", 4.0, name="layers.3.weight", ranks=(1,)),
    )
    assert (found.word, found.level) == ("critical", "critical")
    assert found.line == "non-finite found (since step 7)"
    assert [one.split()[0] for one in found.more] == [
        "gradient-jump", "logged-number", "straggler",
    ]  # fmt: skip
    assert (found.ranks, found.names[0]) == ((1, 2), "layers.3.weight")


def test_a_lost_rank_explains_those_that_wait_for_it() -> None:
    found = verdict(
        alert("stuck", "warning", 1.0, ranks=(0,)),
        alert("stale-rank", "critical", 3.0, ranks=(1,)),
        alert("stale-rank", "warning", 2.0, ranks=(0,)),
        state=State.DOWN,
    )
    assert (found.word, found.cause) == ("down", "run-1-3-0")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"state": State.ENDED, "reason": "rank 1 was killed"}, "ended"),
        ({"state": State.FINISHED, "reason": "all 2 ranks exited with code 0"}, "ended"),
        ({"state": State.STARTING}, "starting"),
        ({"state": State.DEGRADED, "reason": "rank 1: silent"}, "degraded"),
        ({"pause": PauseWord.PAUSED}, "paused"),
    ],
)
def test_each_state_has_its_word_and_a_line(changes: dict[str, object], word: str) -> None:
    found = verdict(**changes)
    assert found.word == word
    assert found.line


def test_reports_that_are_late_are_told_and_are_no_trouble_yet() -> None:
    late = {"state": State.DEGRADED, "reason": "rank 0: its sidecar has not reported for 5 s"}
    assert verdict(**late).word == "degraded"
    nobody_tells = Seen(**late, pause=PauseWord.RUNNING, is_late=True)  # type: ignore[arg-type]
    assert verdict_of(nobody_tells, firing=()).word == "degraded"
    found = verdict(**late, is_late=True)
    assert (found.word, found.level) == ("running", "info")
    assert "has not reported for 5 s" in found.line


def test_the_rate_follows_from_the_cost() -> None:
    pace = Pace(share=0.001)
    pace.begin(0.0)
    for _ in range(QUICK_COUNT):
        assert pace.every_s(0.0) < USUAL_S
        pace.paid(0.030)
    # 30 ms are paid for by 30 s of a thousandth.
    assert pace.every_s(60.0) == pytest.approx(30.0, rel=0.01)
    assert pace.every_s(60.0, hurry=True) == HURRY_S
    # What is dear comes no more often than it is paid for, once the credit is spent.
    pace.paid(CREDIT_S)
    assert pace.every_s(60.0) > LONGEST_S
    assert pace.every_s(60.0, hurry=True) > LONGEST_S


def test_an_hour_costs_no_more_than_its_share_and_the_credit() -> None:
    pace, now_s = Pace(share=0.001), 0.0
    pace.begin(0.0)
    while now_s < 3600.0:
        now_s += pace.every_s(now_s, hurry=True)
        pace.paid(0.2)
    assert pace.spent_s <= CREDIT_S + 0.001 * 3600.0 + 0.2


def test_what_is_told_of_the_rate_is_the_rate() -> None:
    pace = Pace(share=0.001)
    pace.begin(0.0)
    assert pace.usual_s(0.0) == pace.every_s(0.0) < USUAL_S
    pace.paid(0.010)
    pace.paid(0.010)
    # A wait that is reported later counts as what is known at once.
    pace.later(CREDIT_S)
    assert pace.cost_s == pace.spent_s == pytest.approx(CREDIT_S + 0.010)
    assert pace.usual_s(0.0) == pace.every_s(0.0) > LONGEST_S


def test_one_dear_sample_leaves_nobody_blind() -> None:
    pace = Pace(share=0.001)
    pace.begin(0.0)
    # The first one loads numpy, and waits for a busy machine.
    pace.paid(3.0)
    assert pace.usual_s(60.0) < USUAL_S
    for _ in range(QUICK_COUNT):
        pace.paid(0.020)
    pace.paid(3.0)
    pace.paid(0.020)
    assert pace.usual_s(60.0) < 100.0
    # What is spent is repaid before samples are as frequent as they were.
    assert pace.usual_s(60.0) > LONGEST_S
    assert pace.usual_s(5000.0) == pytest.approx(20.0)


def test_a_start_that_makes_the_first_samples_dear_leaves_nobody_blind_either() -> None:
    pace = Pace(share=0.001)
    pace.begin(0.0)
    pace.paid(3.0)
    # The machine is still busy at the second one, whose cost alone is known then.
    pace.paid(4.3)
    assert pace.usual_s(60.0) == PROBE_S
    for _ in range(LAST - 1):
        pace.paid(0.020)
    assert pace.cost_s == 0.020
    assert pace.usual_s(60.0) == REPAYING * LONGEST_S
    # What is dear for good comes as rarely as it has to.
    for _ in range(LAST):
        pace.paid(4.3)
    assert pace.usual_s(60.0) > 4300.0


def test_the_rank_that_waits_longest_counts_whatever_others_have_waited_before() -> None:
    before = Spent(1.0, {0: 50.0, 1: 2.0})
    assert Spent(1.1, {0: 50.0, 1: 2.5, 2: 9.0}).since(before) == pytest.approx(0.5)
    assert Spent(1.1, {0: 0.0, 1: 0.0}).since(before) == pytest.approx(0.1), "new sidecars"
    assert Spent(1.1, {}).since(before, anyhow_s=0.08) == pytest.approx(0.02)
    assert Spent(1.1, {}).since(before, anyhow_s=0.2) == 0.0
