"""A job's health in one word, and its likely cause: the same for all who show it. Pure."""

from collections.abc import Sequence

from paramd.mesh.edits.calls import PauseWord
from paramd.mesh.insight.reports import Alert
from paramd_service.control.alerts.book import Severity
from paramd_service.control.alerts.config import Rule
from paramd_service.control.mesh.registry import State

WORDS = ("ok", "starting", "paused", "warning", "degraded", "critical", "down", "ended")
"""From good to bad; then "ended"."""

TOGETHER_S = 5.0
"""Of alerts that begin within this time, a critical one explains the others."""

_VALUES = (Rule.GRADIENT_JUMP, Rule.NORM_JUMP, Rule.NON_FINITE)
_RANKS = (Rule.STALE_RANK, Rule.STUCK, Rule.STALLED_RANK, Rule.SLOW_RANK, Rule.STRAGGLER)
_FAMILY = {str(rule): family for family in (_VALUES, _RANKS) for rule in family}
WINDOW_S = 120.0
"""Alerts of a family that begin within this time of a critical one have its cause."""


def cause_of(firing: Sequence[Alert]) -> Alert | None:
    """The alert to examine first, the likely cause of the most serious one; None if none fires."""
    if not firing:
        return None
    # A loss that is NaN is a symptom of values that are NaN.
    worst = min(
        firing,
        key=lambda one: (
            one.severity != Severity.CRITICAL, one.rule == Rule.LOGGED_NUMBER, one.first_seen_s
        ),
    )  # fmt: skip
    family = _FAMILY.get(worst.rule, (worst.rule,))
    kin = [
        one
        for one in firing
        if one.rule in family and abs(one.first_seen_s - worst.first_seen_s) <= WINDOW_S
    ]
    first_s = min(one.first_seen_s for one in kin) + TOGETHER_S
    return min(
        (one for one in kin if one.first_seen_s <= first_s),
        key=lambda one: (one.severity != Severity.CRITICAL, one.first_seen_s, _number(one)),
    )


def _number(alert: Alert) -> int:
    """The alert's number, in order of firing; an id is `job-incarnation-number-time`."""
    number = alert.id.split("-")[-2:-1]
    return int(number[0]) if number and number[0].isdecimal() else 0


def health_of(
    *, state: State, reason: str, pause: PauseWord, firing: Sequence[Alert]
) -> tuple[str, str, str]:
    """(word, why, id of the alert that is the likely cause or "")."""
    # A few milliseconds' wait for a copy deserves a line, not a verdict.
    firing = [one for one in firing if one.rule != Rule.STALL_BUDGET]
    cause = cause_of(firing)
    if state is State.ENDED:
        return "ended", reason, ""
    # The alert of a rank that hangs or lost its trainer says more than the rank's state.
    if cause is not None:
        others = len(firing) - 1
        more = f" (and {others:,} more alert{'s' * (others > 1)})" if others else ""
        critical = any(one.severity == Severity.CRITICAL for one in firing)
        word = "down" if state is State.DOWN else "critical" if critical else "warning"
        return word, f"{cause.reason}{more}", cause.id
    if state in (State.DOWN, State.DEGRADED):
        return state.value, reason, ""
    if pause is not PauseWord.RUNNING:
        return "paused", "training is paused on request", ""
    return ("starting", reason, "") if state is State.STARTING else ("ok", "", "")
