"""Each rule: what makes it find something, and what nearly does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paramd.errors import UsageError
from paramd_service.control.alerts.config import AlertConfig, Rule
from paramd_service.control.alerts.rules import RankInput, certificate, mesh_findings
from paramd_service.control.alerts.sampling import NormHistory, TensorInput, tensor_findings

CONFIG = AlertConfig()


def well(rank: int, **changes: object) -> RankInput:
    usual = RankInput(
        rank=rank,
        membership="joined",
        reason="",
        age_s=1.0,
        step=100,
        step_time_s=0.2,
        boundary_age_s=0.1,
        stall_count=0,
        stall_total_s=0.0,
        stall_max_s=0.0,
        layout_digest="abc",
        trainer_lives=True,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def found(
    *ranks: RankInput, before: tuple[RankInput, ...] = (), config: AlertConfig = CONFIG
) -> list[tuple[str, tuple[int, ...]]]:
    now, old = ({rank.rank: rank for rank in some} for some in (ranks, before))
    return [(f.rule.value, f.ranks) for f in mesh_findings(now, old, config)]


def test_a_well_mesh_has_no_finding() -> None:
    ranks = tuple(well(rank) for rank in range(4))
    assert found(*ranks, before=ranks) == []


@pytest.mark.parametrize(
    ("changes", "stale"),
    [
        ({"age_s": 9.9, "membership": "silent"}, False),
        ({"age_s": 10.0, "membership": "silent"}, True),
        ({"membership": "gone", "age_s": 0.5}, True),
        ({"membership": "left"}, False),
        ({"trainer_lives": False}, True),
        ({"membership": "missing", "step": -1, "age_s": 9.9}, False),
        ({"membership": "missing", "step": -1, "age_s": 10.0}, True),
    ],
)
def test_a_rank_that_is_not_heard_of_is_stale(changes: dict[str, object], stale: bool) -> None:
    assert found(well(0), well(1, **changes)) == ([("stale-rank", (1,))] if stale else [])


def test_one_rank_without_updates_is_stalled_and_named() -> None:
    assert found(well(0), well(1, boundary_age_s=301.0)) == [("stalled-rank", (1,))]
    assert found(well(0), well(1, boundary_age_s=299.0)) == []
    assert found(well(0), well(1, boundary_age_s=301.0, step_time_s=0.2)) != []


def test_a_rank_with_long_steps_gets_twenty_of_them() -> None:
    slow = well(0, step_time_s=60.0, boundary_age_s=1100.0)
    assert found(slow) == []
    assert found(replace(slow, boundary_age_s=1200.0)) == [("stalled-rank", (0,))]


def test_when_all_ranks_stand_still_there_is_one_finding() -> None:
    ranks = [well(rank, boundary_age_s=400.0) for rank in range(3)]
    (finding,) = mesh_findings({r.rank: r for r in ranks}, {}, CONFIG)
    assert (finding.subject, finding.ranks) == ("mesh", (0, 1, 2))


def lasting(*ranks: RankInput, config: AlertConfig = CONFIG) -> list[tuple[str, tuple[int, ...]]]:
    """Findings where ranks were a window ago as they are now."""
    return found(*ranks, before=ranks, config=config)


def test_a_straggler_is_half_as_slow_again_as_the_median() -> None:
    others = [well(rank) for rank in range(3)]
    assert lasting(*others, well(3, step_time_s=0.31)) == [("straggler", (3,))]
    assert lasting(*others, well(3, step_time_s=0.29)) == []
    tiny = [well(rank, step_time_s=0.001) for rank in range(3)]
    assert lasting(*tiny, well(3, step_time_s=0.009)) == []


def test_of_two_ranks_the_slower_one_is_the_straggler() -> None:
    assert lasting(well(0), well(1, step_time_s=0.31)) == [("straggler", (1,))]


def test_one_long_step_makes_no_straggler() -> None:
    slow = well(1, step_time_s=3.0)
    assert found(well(0), slow, before=(well(0), well(1))) == []
    assert found(well(0), slow, before=(well(0, step_time_s=3.0), well(1))) == []
    assert found(well(0), slow) == []


def test_waits_above_the_budget_are_found_within_the_window_only() -> None:
    before = well(0, stall_count=5, stall_total_s=1.0, stall_max_s=0.5)
    assert found(before, before=(before,)) == []
    longest = replace(before, stall_count=6, stall_total_s=1.6, stall_max_s=0.6)
    assert found(longest, before=(before,)) == [("stall-budget", (0,))]
    often = replace(before, stall_count=7, stall_total_s=1.02)
    assert found(often, before=(before,)) == [("stall-budget", (0,))]
    short = replace(before, stall_count=15, stall_total_s=1.02)
    assert found(short, before=(before,)) == []


def test_counters_that_begin_anew_are_no_stall() -> None:
    before = well(0, stall_count=5, stall_total_s=1.0, stall_max_s=0.001)
    after = well(0, stall_count=1, stall_total_s=0.001, stall_max_s=0.9)
    assert found(after, before=(before,)) == []


def test_the_minority_layout_is_named_and_a_tie_names_all() -> None:
    odd = well(2, layout_digest="other")
    assert found(well(0), well(1), odd) == [("layout-mismatch", (2,))]
    assert found(well(0), odd) == [("layout-mismatch", (0, 2))]
    assert found(well(0), replace(odd, membership="gone", reason="lost")) == [("stale-rank", (2,))]


@pytest.mark.parametrize(
    ("left_days", "severities"),
    [(14.1, []), (14.0, ["warning"]), (1.1, ["warning"]), (1.0, ["critical"]), (-3, ["critical"])],
)
def test_a_certificate_is_told_of_before_it_expires(
    left_days: float, severities: list[str]
) -> None:
    now_s = 1.7e9
    told = list(certificate(now_s + left_days * 86_400, now_s, CONFIG))
    assert [finding.severity.value for finding in told] == severities
    assert all(f"{abs(left_days):.1f} days" in finding.reason for finding in told)
    assert list(certificate(None, now_s, CONFIG)) == []
    off = AlertConfig(disabled=("certificate",))
    assert list(certificate(now_s - 1, now_s, off)) == []


def test_a_rule_that_is_disabled_finds_nothing() -> None:
    config = AlertConfig(disabled=("straggler",))
    assert lasting(well(0), well(1, step_time_s=9.0), config=config) == []


def tensor(norm: float, *, nan: int = 0, inf: int = 0, fqn: str = "w") -> TensorInput:
    return TensorInput(fqn=fqn, count=100, nan_count=nan, inf_count=inf, norm=norm)


def test_norms_that_are_no_numbers_are_not_compared_with() -> None:
    history = NormHistory(CONFIG.norm_window)
    for norm in (1.0, math.nan, 2.0):
        history.seen([tensor(norm, nan=100 if math.isnan(norm) else 0)])
    assert list(history.of("w")) == [1.0, 2.0]


def judged(norms: list[float], last: TensorInput, config: AlertConfig = CONFIG) -> list[str]:
    history = NormHistory(config.norm_window)
    for norm in norms:
        history.seen([tensor(norm)])
    return [f.rule.value for f in tensor_findings([last], history, 7, config)]


@pytest.mark.parametrize(("nan", "inf"), [(1, 0), (0, 1), (3, 4)])
def test_one_element_that_is_no_number_is_enough(nan: int, inf: int) -> None:
    assert judged([], tensor(1.0, nan=nan, inf=inf)) == ["non-finite"]


def test_a_norm_jumps_against_its_running_median_in_both_directions() -> None:
    usual = [10.0, 11.0, 10.5, 9.5, 10.0]
    assert judged(usual, tensor(99.0)) == []
    assert judged(usual, tensor(101.0)) == ["norm-jump"]
    assert judged(usual, tensor(0.9)) == ["norm-jump"]
    assert judged(usual, tensor(1.1)) == []
    assert judged(usual[:4], tensor(1e6)) == []
    # One outlier among them does not move the median.
    assert judged([*usual, 1e6], tensor(104.0)) == ["norm-jump"]


def test_a_bias_that_grows_from_zero_does_not_jump() -> None:
    assert judged([0.0, 1e-5, 2e-5, 1e-4, 3e-4], tensor(0.05)) == []
    assert judged([0.0] * 5, tensor(5.0)) == ["norm-jump"]
    assert judged([0.0] * 5, tensor(0.0)) == []


def test_many_bad_tensors_are_told_in_short() -> None:
    bad = [tensor(1.0, nan=1, fqn=f"w{i}") for i in range(200)]
    found = tensor_findings(bad, NormHistory(5), 3, CONFIG)
    assert len(found) == 51
    assert (found[-1].subject, found[-1].reason) == ("more tensors", "150 more tensors")


@pytest.mark.parametrize(
    "wrong",
    [
        {"stats_every_s": 0.0},
        {"stats_every_s": float("nan")},
        {"norm_jump_ratio": 1.0},
        {"sample_bytes": 0},
        {"disabled": ("no-such-rule",)},
        {"webhooks": ("http://example.com/hook",)},
        {"webhooks": ("ftp://127.0.0.1/",)},
        {"webhooks": ("https://user:pw@example.com/",)},
        {"webhooks": ("https://",)},
    ],
)
def test_a_config_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        AlertConfig(**wrong)  # type: ignore[arg-type]


def test_webhooks_go_to_https_or_this_machine() -> None:
    good = ("https://hooks.example.com/x?y", "http://127.0.0.1:9/x", "http://localhost/x")
    assert AlertConfig(webhooks=good).webhooks == good
    assert set(AlertConfig(disabled=tuple(Rule)).disabled) == set(Rule)
