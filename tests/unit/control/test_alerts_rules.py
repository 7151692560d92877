"""Each rule: what makes it find something, and what nearly does."""

from dataclasses import replace

import pytest

from paramd.errors import UsageError
from paramd_service.alerts.config import AlertConfig, parse_alerts
from paramd_service.alerts.numbers import NumberHistory
from paramd_service.alerts.rules import Ends, RankInput, certificate, failed_export, mesh_findings
from paramd_service.alerts.sampling import TensorInput
from paramd_service.alerts.values import Values
from paramd_service.control.parts import Failure

CONFIG = AlertConfig()


def well(rank: int, **changes: object) -> RankInput:
    usual = RankInput(
        rank=rank, membership="joined", reason="", age_s=1.0, step=100, step_time_s=0.2,
        boundary_age_s=0.1, stall_count=0, stall_total_s=0.0, stall_max_s=0.0, layout_digest="abc",
        trainer_lives=True,
    )  # fmt: skip
    return replace(usual, **changes)  # type: ignore[arg-type]


OTHER_LAYOUT = well(2, layout_digest="other")


@pytest.mark.parametrize(
    ("ranks", "before", "expected"),
    [
        ([well(0), well(1)], [well(0), well(1)], []),
        # A clock that jumps, and one that a new sidecar counts anew.
        ([well(0), well(1, clock_jump_s=3600.0)], [well(0), well(1)], [("clock-jump", (1,))]),
        ([well(0, clock_jump_s=-9.0)], [well(0)], [("clock-jump", (0,))]),
        ([well(0, clock_jump_s=4.9)], [well(0)], []),
        ([well(0, clock_jump_s=3600.0)], [well(0, clock_jump_s=3600.0)], []),
        ([well(0, clock_jump_s=60.0)], [well(0, sidecar_pid=7)], []),
        # Not heard of.
        ([well(0, age_s=9.9, membership="silent")], [], []),
        ([well(0, age_s=10.0, membership="silent")], [], [("stale-rank", (0,))]),
        ([well(0, membership="gone", age_s=0.5)], [], [("stale-rank", (0,))]),
        ([well(0, membership="left")], [], []),
        ([well(0, trainer_lives=False)], [], [("stale-rank", (0,))]),
        # The first to end is named first.
        (
            [well(0, trainer_lives=False, ended_s=2.0), well(1, trainer_lives=False, ended_s=2.5)],
            [],
            [("stale-rank", (1,)), ("stale-rank", (0,))],
        ),
        ([well(0, membership="missing", step=-1, age_s=59.9)], [], []),
        ([well(0, membership="missing", step=-1, age_s=60.0)], [], [("stale-rank", (0,))]),
        # Without updates; one with long steps gets twenty of them.
        ([well(0), well(1, boundary_age_s=301.0)], [], [("stalled-rank", (1,))]),
        ([well(0), well(1, boundary_age_s=299.0)], [], []),
        ([well(0, step_time_s=0.0, boundary_age_s=890.0)], [], []),
        ([well(0, step_time_s=60.0, boundary_age_s=1100.0)], [], []),
        ([well(0, step_time_s=60.0, boundary_age_s=1200.0)], [], [("stalled-rank", (0,))]),
        ([well(n, boundary_age_s=400.0) for n in (0, 1)], [], [("stalled-rank", (0, 1))]),
        # Half as slow again as the median, for the whole window.
        *(
            ([well(0), well(1), well(2), slow], [well(0), well(1), well(2), before], expected)
            for slow, before, expected in (
                (well(3, step_time_s=0.31), well(3, step_time_s=0.31), [("straggler", (3,))]),
                (well(3, step_time_s=0.29), well(3, step_time_s=0.29), []),
                (well(3, step_time_s=3.0), well(3), []),
            )
        ),
        # The minority is named, and of a tie all.
        ([well(0), well(1), OTHER_LAYOUT], [], [("layout-mismatch", (2,))]),
        ([well(0), OTHER_LAYOUT], [], [("layout-mismatch", (0, 2))]),
        ([well(0), replace(OTHER_LAYOUT, membership="gone")], [], [("stale-rank", (2,))]),
    ],
)
def test_a_rule_finds_the_ranks_in_trouble_and_no_others(
    ranks: list[RankInput], before: list[RankInput], expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    now, old = ({rank.rank: rank for rank in some} for some in (ranks, before))
    assert [(f.rule.value, f.ranks) for f in mesh_findings(now, old, CONFIG)] == expected


def test_a_rank_that_a_signal_has_killed_is_the_first_of_those_that_end_with_it() -> None:
    def firsts(killed_s: float, other_s: float) -> list[int]:
        ranks = {
            0: well(0, trainer_lives=False, reason="exited with code 1", ended_s=other_s),
            1: well(1, trainer_lives=False, killed=True, ended_s=killed_s),
        }
        found = mesh_findings(ranks, {}, CONFIG)
        return [one.ranks[0] for one in found if one.severity == "critical"]

    assert firsts(3.0, 2.5) == [1]
    assert firsts(2.5, 3.0) == [1]
    # torchrun kills those that are left half a minute later.
    assert firsts(2.0, 32.0) == [0]


def test_a_host_that_is_lost_comes_before_the_trainers_that_end_because_of_it() -> None:
    ranks = {
        0: well(0, trainer_lives=False, reason="exited with code 1", ended_s=2.0),
        1: well(1, membership="gone", reason="its sidecar was lost 3 s ago", age_s=3.0),
    }
    first, second = mesh_findings(ranks, {}, CONFIG)
    assert (first.ranks, first.severity) == ((1,), "critical")
    assert (second.ranks, second.severity) == ((0,), "warning")
    assert second.reason.endswith("; 1 s after rank 1")


def test_late_reports_do_not_make_ranks_that_end_together_take_turns() -> None:
    ends = Ends()
    lates_s = [(0.0, 0.8), (0.9, 0.1), (0.2, 0.0), (0.0, 0.7)]
    orders = []
    for at_s, (first, second) in enumerate(lates_s, 10):
        # Trainers ended at 1.0 and 1.1; what reports say of it is late.
        ranks = {
            0: well(0, trainer_lives=False, ended_s=at_s - 1.0 - first),
            1: well(1, trainer_lives=False, ended_s=at_s - 1.1 - second),
        }
        known = ends.known(ranks, at_s)
        orders.append([one.ranks[0] for one in mesh_findings(known, {}, CONFIG)])
    assert orders == [[0, 1]] * 4
    assert ends.known({0: well(0)}, 15.0)[0].ended_s == 0.0


@pytest.mark.parametrize(
    ("left_days", "severities"),
    [(14.1, []), (14.0, ["warning"]), (1.1, ["warning"]), (1.0, ["critical"]), (-3, ["critical"])],
)
def test_a_certificate_is_told_of_before_it_expires(
    left_days: float, severities: list[str]
) -> None:
    told = certificate(1.7e9 + left_days * 86_400, 1.7e9, CONFIG)
    assert [finding.severity.value for finding in told] == severities


USUAL = [10.0, 11.0, 10.5, 9.5, 10.0]


@pytest.mark.parametrize(
    ("norms", "last", "bad_counts", "rules"),
    [
        ([], 1.0, (1, 0), ["non-finite"]),
        ([], 1.0, (0, 1), ["non-finite"]),
        (USUAL, 99.0, (0, 0), []),
        (USUAL, 101.0, (0, 0), ["norm-jump"]),
        (USUAL, 0.9, (0, 0), ["norm-jump"]),
        (USUAL, 1.1, (0, 0), []),
        (USUAL[:4], 1e6, (0, 0), []),
        # One outlier among them does not move the median.
        ([*USUAL, 1e6], 104.0, (0, 0), ["norm-jump"]),
        # A bias grows from zero.
        ([0.0, 1e-5, 2e-5, 1e-4, 3e-4], 0.05, (0, 0), []),
        ([0.0] * 5, 5.0, (0, 0), ["norm-jump"]),
    ],
)
def test_a_tensor_is_judged_by_its_bad_elements_and_its_norms_median(
    norms: list[float], last: float, bad_counts: tuple[int, int], rules: list[str]
) -> None:
    def tensor(norm: float, nan: int = 0, inf: int = 0) -> TensorInput:
        return TensorInput(fqn="w", count=100, nan_count=nan, inf_count=inf, norm=norm)

    values = Values(CONFIG)
    for step, norm in enumerate(norms):
        values.take([tensor(norm)], step)
    found = values.take([tensor(last, *bad_counts)], 7)
    assert [f.rule.value for f in found] == rules


def test_after_a_rollback_norms_are_compared_with_what_came_before_that_step() -> None:
    values = Values(CONFIG)

    def takes(steps: range, norm: float) -> list[str]:
        found = [
            one
            for step in steps
            for one in values.take(
                [TensorInput(fqn="w", count=100, nan_count=0, inf_count=0, norm=norm)], step
            )
        ]
        return [one.rule.value for one in found]

    assert takes(range(8), 10.0) == []
    # It becomes usual: most of the last rounds have it.
    assert takes(range(8, 30), 1e6)
    assert takes(range(5, 15), 10.0) == [], "it is back where it was"


def test_after_a_rollback_a_loss_is_compared_with_what_came_before_that_step() -> None:
    history = NumberHistory(["loss jumps 3"])

    def takes(steps: range, loss: float) -> bool:
        values = [(step, loss) for step in steps]
        judged = history.judge(0, "loss", values)
        return bool(judged or history.spike(0, "loss", values))

    assert not takes(range(30), 8.0)
    # A slow fall to a hundredth, of which nothing is kept.
    assert not takes(range(1000, 1100), 0.08)
    assert not takes(range(20, 60), 8.0), "it is back where it was"
    assert takes(range(60, 65), 80.0)


def test_a_spike_is_told_by_its_highest_value_and_the_highest_before_it() -> None:
    history = NumberHistory([])
    assert history.spike(0, "loss", [(step, 0.1) for step in range(50)]) is None
    found = history.spike(0, "loss", [(50, 0.2), (51, 4000.0), (52, 1.0), (53, 0.9)])
    assert found is not None
    assert (
        "jumped to 4000 at step 51; the largest of its last values before was 0.2" in found.reason
    )
    assert found.step == 51


def test_each_rule_over_logged_numbers_finds_what_violates_it() -> None:
    history = NumberHistory(["loss > 10", "loss jumps 3", "lr < 0"])
    assert history.judge(0, "loss", [(step, 1.0) for step in range(4)]) == []
    # Too few values for a jump.
    assert history.judge(0, "loss", [(4, 4.0)]) == []
    [jump] = history.judge(0, "loss", [(5, 3.5)])
    assert "median" in jump.reason
    found = history.judge(0, "loss", [(6, 11.0), (7, 1.0)])
    assert [(one.step, one.severity) for one in found] == [(6, "warning")] * 2
    [bad] = history.judge(0, "loss", [(8, float("nan"))])
    assert (bad.severity, bad.step, bad.ranks) == ("critical", 8, (0,))
    [low] = history.judge(3, "lr", [(1, -1e-9)])
    assert "below 0" in low.reason
    assert history.judge(1, "loss", [(1, 3.5)]) == []


def test_training_is_paused_only_on_its_users_word() -> None:
    table = {"pause": ["logged-number"]}
    assert parse_alerts(table, place="own") == {"pause": ("logged-number",)}
    with pytest.raises(UsageError, match="pause in the working directory is not trusted"):
        parse_alerts(table, place="here", trusted=False)


def test_a_failed_export_is_told_of_for_minutes() -> None:
    failed = Failure(
        "the export to disk/x", reason="no space left on device", ended_s=100.0, step=7
    )
    assert list(failed_export(None, 101.0, CONFIG)) == []
    (found,) = failed_export(failed, 101.0, CONFIG)
    assert (found.rule, found.step) == ("failed-export", 7)
    assert found.reason == "the export to disk/x failed: no space left on device"
    assert list(failed_export(failed, 701.0, CONFIG)) == []
