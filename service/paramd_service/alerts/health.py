"""What is to be said of the alerts of a job. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paramd.mesh.insight.reports import Alert
from paramd_service.alerts.book import Severity
from paramd_service.alerts.config import Rule
from paramd_service.control.mesh.health import Seen, Verdict, Watch, level_of
from paramd_service.control.mesh.health import verdict_of as verdict_without
from paramd_service.control.mesh.registry import State

MAX_MORE = 20
"""Most lines beside the first."""

_WORST_FIRST: tuple[Rule, ...] = (
    Rule.STALE_RANK, Rule.STUCK, Rule.LAYOUT_MISMATCH, Rule.NON_FINITE, Rule.REPLICA_DRIFT,
    Rule.STALLED_RANK, Rule.GRADIENT_JUMP, Rule.NORM_JUMP, Rule.LOGGED_NUMBER, Rule.SLOW_RANK,
    Rule.STRAGGLER, Rule.CLOCK_JUMP, Rule.FAILED_EXPORT, Rule.STORE, Rule.LOST_MARK,
    Rule.CERTIFICATE,
)  # fmt: skip
"""Causes before symptoms: a rank that is lost makes others hang, values that are not finite make
the loss NaN."""
_PLACE_OF = {str(rule): place for place, rule in enumerate(_WORST_FIRST)}

_OF_VALUES = frozenset({str(Rule.GRADIENT_JUMP), str(Rule.NORM_JUMP), str(Rule.STUCK)})
"""Warnings that explain a critical symptom, such as a loss that is NaN."""


def worst_first(firing: Sequence[Alert]) -> list[Alert]:
    """The alerts in the order in which they deserve to be examined: the worst is the first, however
    late it began. Of alerts of one rule the critical ones come first, then the oldest."""
    return sorted(firing, key=_badness)


def _badness(one: Alert) -> tuple[int, int, bool, float, int]:
    critical = one.severity == Severity.CRITICAL
    place = _PLACE_OF.get(one.rule, len(_WORST_FIRST))
    if critical and one.rule != Rule.LOGGED_NUMBER:
        group = 0
    else:
        group = 1 if critical or one.rule in _OF_VALUES else 2
    return group, place, not critical, one.first_seen_s, _number(one)


def _number(alert: Alert) -> int:
    """The alert's number, in order of firing; an id is `job-incarnation-number-time`."""
    number = alert.id.split("-")[-2:-1]
    return int(number[0]) if number and number[0].isdecimal() else 0


def line_of(alert: Alert) -> str:
    """An alert in one line, with the step since which it fires."""
    known = alert.step < 0 or f"step {alert.step}" in alert.reason
    return alert.reason if known else f"{alert.reason} (since step {alert.step})"


def verdict_of(
    seen: Seen,
    *,
    firing: Sequence[Alert],
    watches: Sequence[Watch] = (),
    tells_of_late: bool = False,
) -> Verdict:
    """The verdict on a job with alerts; else as `paramd_service.control.mesh.health.verdict_of`."""
    alerts = _of_alerts(worst_first(firing), seen.state, watches) if firing else None
    return verdict_without(seen, alerts=alerts, watches=watches, tells_of_late=tells_of_late)


def _of_alerts(alerts: Sequence[Alert], state: State, watches: Sequence[Watch]) -> Verdict:
    first = alerts[0]
    critical = any(one.severity == Severity.CRITICAL for one in alerts)
    word = "down" if state is State.DOWN else "critical" if critical else "warning"
    return Verdict(
        level=level_of(word),
        word=word,
        line=line_of(first),
        cause=first.id,
        more=tuple(line_of(one) for one in alerts[1 : MAX_MORE + 1]),
        ranks=tuple(sorted({rank for one in alerts for rank in one.ranks})),
        names=tuple(dict.fromkeys(one.name for one in alerts if one.name)),
        step=first.step,
        watches=tuple(watches),
    )
