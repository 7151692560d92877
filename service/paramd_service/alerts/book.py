"""The alerts of one mesh.

    nothing --found--> FIRING --not found for CLEAR_AFTER_S--> RESOLVED

Findings repeat; one alert is kept per key, so nothing is reported twice. A finding that returns
after its alert was resolved starts a new one. `Book` does no I/O and has no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from paramd.mesh.insight.reports import Alert, Suspect
from paramd_service.alerts.config import Rule
from paramd_service.alerts.store import MAX_FIRING, State

CLEAR_AFTER_S = 5.0
"""Seconds without a sighting after which an alert is resolved: a value around its threshold must
not be reported every second."""


class Severity(StrEnum):
    """How serious an alert is."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem found by a rule in one check."""

    rule: Rule
    subject: str
    """What the rule was applied to: "rank 3", a tensor's name, "mesh"."""
    severity: Severity
    reason: str
    """In words, with the deciding numbers; never parameter values."""
    ranks: tuple[int, ...] = ()
    """Ranks it concerns."""
    fqn: str = ""
    """Tensor it concerns; empty for none."""
    step: int = -1
    """Step it was found at; -1 for none."""
    others: tuple[str, ...] = ()
    """Tensors that it concerns beside `fqn`."""
    onset: tuple[int, int] | None = None
    """Steps between which its cause lies, see `onset_of`; None: no edit can be its cause."""


Covered = Callable[[Alert], bool]
"""Whether a check would have found a firing alert's problem again."""

Observe = Callable[[Sequence[Finding], Covered], None]
"""Enters the findings of one check into the book, which reports the changes."""


class Book:
    """The alerts of one job in one incarnation."""

    def __init__(
        self,
        *,
        job: str,
        incarnation: int,
        suspect: Callable[[Finding, float], Suspect | None] = lambda finding, now_s: None,
    ) -> None:
        """`suspect` tells which change may have caused a finding, asked once as its alert fires."""
        self._suspect = suspect
        self._job = job
        self._incarnation = incarnation
        self._firing: dict[tuple[str, str], Alert] = {}
        self.fired_count = 0
        """Alerts that have ever fired."""

    @property
    def firing(self) -> tuple[Alert, ...]:
        """Firing alerts, newest first."""
        return tuple(sorted(self._firing.values(), key=lambda a: (-a.first_seen_s, a.id)))

    def observe(
        self, findings: Iterable[Finding], *, covered: Covered, now_s: float
    ) -> list[Alert]:
        """Process the findings of one check; return alerts that started firing or were resolved.
        `covered`: whether a firing alert that was not found may be over."""
        found = {(finding.rule.value, finding.subject): finding for finding in findings}
        changes = [alert for key, one in found.items() if (alert := self._found(key, one, now_s))]
        for key, alert in list(self._firing.items()):
            late = now_s - alert.last_seen_s >= CLEAR_AFTER_S
            if key not in found and late and covered(alert):
                changes.append(self._end(key, now_s))
        return changes

    def end(self, covered: Covered, now_s: float) -> list[Alert]:
        """Resolve at once what nobody will look at again; return what was firing of it."""
        over = [key for key, alert in self._firing.items() if covered(alert)]
        return [self._end(key, now_s) for key in over]

    def close(self, now_s: float) -> list[Alert]:
        """Resolve everything because the incarnation has ended; return what was firing."""
        return self.end(lambda _: True, now_s)

    def restore(self, alerts: Iterable[Alert]) -> None:
        """Resume alerts that were firing before a restart of the control plane."""
        for alert in alerts:
            self._firing.setdefault((alert.rule, alert.subject), alert)

    def _found(self, key: tuple[str, str], finding: Finding, now_s: float) -> Alert | None:
        """Record a finding; return its alert if that is new."""
        known = self._firing.get(key)
        if known is None:
            if len(self._firing) >= MAX_FIRING:
                return None
            self.fired_count += 1
        since_s = known.first_seen_s if known is not None else now_s
        # Since when it is so: what is found later is in the reason.
        step = finding.step
        if known is not None and known.step >= 0:
            step = known.step
        number = f"{self._job}-{self._incarnation}-{self.fired_count}-{int(1e3 * now_s):x}"
        self._firing[key] = Alert(
            id=known.id if known is not None else number,
            job=self._job,
            incarnation=self._incarnation,
            rule=finding.rule.value,
            subject=finding.subject,
            severity=finding.severity.value,
            state=State.FIRING.value,
            reason=finding.reason,
            ranks=finding.ranks,
            name=finding.fqn,
            step=step,
            first_seen_s=since_s,
            last_seen_s=now_s,
            resolved_s=None,
            suspect=known.suspect if known is not None else self._suspect(finding, now_s),
        )
        return self._firing[key] if known is None else None

    def _end(self, key: tuple[str, str], now_s: float) -> Alert:
        return replace(self._firing.pop(key), state=State.RESOLVED.value, resolved_s=now_s)
