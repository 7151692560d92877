"""The life of an alert, told once; what is read of config files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramd.errors import UsageError
from paramd.mesh.insight.reports import Alert
from paramd.trainer.settings import AttachSettings
from paramd_service.control.alerts.book import Book, Finding, Severity
from paramd_service.control.alerts.config import Rule
from paramd_service.control.alerts.service import load_alerts
from paramd_service.control.store.alerts import State


def finding(subject: str = "rank 1", *, reason: str = "x") -> Finding:
    return Finding(rule=Rule.STALE_RANK, subject=subject, severity=Severity.CRITICAL, reason=reason)


def new_book() -> Book:
    return Book(job="job", incarnation=2)


def changes(found: Book, now_s: float, *findings: Finding) -> list[Alert]:
    return found.observe(findings, covered=lambda _: True, now_s=now_s)


def see(found: Book, now_s: float, *findings: Finding) -> list[tuple[str, str]]:
    return [(alert.subject, alert.state) for alert in changes(found, now_s, *findings)]


def test_an_alert_is_told_when_it_begins_and_when_it_is_over() -> None:
    found = new_book()
    assert see(found, 100, finding()) == [("rank 1", "firing")]
    assert see(found, 101, finding(reason="y")) == []
    (alert,) = found.firing
    assert (alert.first_seen_s, alert.last_seen_s) == (100, 101)
    assert alert.reason == "y"
    assert see(found, 105) == []
    (over,) = changes(found, 106)
    assert (over.state, over.resolved_s, over.id) == (State.RESOLVED, 106, alert.id)
    assert found.firing == ()


def test_what_comes_back_at_once_was_never_over() -> None:
    found = new_book()
    see(found, 100, finding())
    assert see(found, 104) == []
    assert see(found, 104.5, finding()) == []
    assert see(found, 109) == []
    assert len(found.firing) == 1


def test_a_look_that_does_not_cover_an_alert_does_not_end_it() -> None:
    found = new_book()
    see(found, 100, finding("w"))
    assert found.observe([], covered=lambda alert: alert.subject != "w", now_s=200) == []
    assert len(found.firing) == 1


def test_the_environment_wins_over_the_directory_s_file_and_that_over_the_own(
    tmp_path: Path,
) -> None:
    here, own = tmp_path / "here.toml", tmp_path / "own.toml"
    here.write_text("[alerts]\nstats_every_s = 5\nnorm_jump_ratio = 3\n")
    own.write_text('[alerts]\nstats_every_s = 7\nwebhooks = ["https://example.com/x"]\n')
    places = [(here, False), (own, True), (tmp_path / "none.toml", True)]
    config = load_alerts(places, {}, watch=True)
    assert (config.stats_every_s, config.norm_jump_ratio) == (5, 3)
    assert config.webhooks == ("https://example.com/x",)
    assert (
        load_alerts(places, {"PARAMD_ALERTS": '{"stats_every_s": 9}'}, watch=True).stats_every_s
        == 9
    )
    assert not config.watch
    sampling = {"PARAMD_ALERTS": '{"watch": true}'}
    assert load_alerts(places, sampling, watch=True).watch
    off = load_alerts(places, sampling, watch=False)
    assert not off.watch
    assert not off.compare


def test_waits_are_judged_by_the_trainers_own_budget() -> None:
    def judged(**environment: str) -> float:
        return load_alerts([], environment, watch=True).stall_budget_s

    assert judged() == AttachSettings().stall_budget_ms / 1e3
    assert judged(PARAMD_STALL_BUDGET_MS="20") == 0.02
    assert judged(PARAMD_STALL_BUDGET_MS="0") == judged()
    both = {"PARAMD_STALL_BUDGET_MS": "20", "PARAMD_ALERTS": '{"stall_budget_s": 0.5}'}
    assert judged(**both) == 0.5
    with pytest.raises(UsageError, match="PARAMD_STALL_BUDGET_MS must be a number"):
        judged(PARAMD_STALL_BUDGET_MS="much")


@pytest.mark.parametrize(
    "text",
    [
        '[alerts]\nwebhooks = ["http://127.0.0.1/x"]',
        "[alerts]\nno_such_key = 1",
        '[alerts]\nstats_every_s = "5"',
        "[alerts]\nwatch = 1",
        "[alerts]\nnorm_window = 2.5",
        "[alerts]\nstats_every_s = true",
        "[alerts]\ndisabled = [1]",
        "[alerts]\nstats_every_s = -1",
        "alerts = 3",
        "not toml",
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "paramd.toml"
    path.write_text(text)
    with pytest.raises(UsageError):
        load_alerts([(path, False)], {}, watch=True)
