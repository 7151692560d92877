"""The life of an alert, told once; what is read of config files."""

import pytest

from paramd.errors import UsageError
from paramd.mesh.insight.reports import Alert
from paramd.trainer.settings import AttachSettings
from paramd_service.alerts.book import Book, Finding, Severity
from paramd_service.alerts.config import Rule, load_alerts
from paramd_service.alerts.store import State


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


def test_what_nobody_looks_at_again_is_over_at_once() -> None:
    found = new_book()
    see(found, 100, finding("v"), finding("w"))
    (over,) = found.end(lambda alert: alert.subject == "w", 101)
    assert (over.subject, over.state, over.resolved_s) == ("w", State.RESOLVED, 101)
    assert [alert.subject for alert in found.firing] == ["v"]


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
