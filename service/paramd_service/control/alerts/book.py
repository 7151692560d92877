"""The alerts of one mesh: what fires, since when, and what is over. No I/O, no clock.

    nothing --found--> PENDING --found for `hold_s`--> FIRING --not found--> RESOLVED

Findings come in again and again; one alert is kept for each key, so nothing is told twice.
An alert that comes back after it was resolved is a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from pydantic import BaseModel, Field

from paramd_service.control.alerts.config import Rule

MAX_FIRING = 1000
"""More alerts at once than this are counted, not kept."""

MAX_RESOLVED = 500
"""Resolved alerts kept in memory; the store keeps them longer."""

MAX_KEPT = 2000


class Severity(StrEnum):
    """How much it matters."""

    WARNING = "warning"
    CRITICAL = "critical"


class State(StrEnum):
    """Where an alert is in its life."""

    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a rule found wrong, once."""

    rule: Rule
    subject: str
    """What it is about within the rule: "rank 3", a tensor's name, "mesh"."""
    severity: Severity
    reason: str
    """In words, with the numbers that decided; never values of parameters."""
    ranks: tuple[int, ...] = ()
    """Ranks it is about."""
    fqn: str = ""
    """Tensor it is about; empty when about none."""
    step: int = -1
    """Step it was found at; -1 when about none."""
    hold_s: float = 0.0
    """Told only after it was found for this long, in seconds."""

    @property
    def key(self) -> str:
        """Equal keys are the same trouble."""
        return f"{self.rule.value}/{self.subject}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One trouble from its first to its last sight. Times are seconds since the Unix epoch."""

    id: str
    job: str
    epoch: int
    finding: Finding
    """As last found."""
    state: State
    first_seen_s: float
    last_seen_s: float
    resolved_s: float | None = None
    seen_count: int = 1


@dataclass(slots=True)
class _Pending:
    finding: Finding
    since_s: float


class Book:
    """All alerts of one job in one epoch."""

    def __init__(self, *, job: str, epoch: int, clear_after_s: float) -> None:
        self._job = job
        self._epoch = epoch
        self._clear_after_s = clear_after_s
        self._firing: dict[str, Alert] = {}
        self._pending: dict[str, _Pending] = {}
        self._resolved: deque[Alert] = deque(maxlen=MAX_RESOLVED)
        self.fired_count = 0
        """Alerts ever fired."""
        self.dropped_count = 0
        """Alerts not kept because there were too many."""

    @property
    def firing(self) -> tuple[Alert, ...]:
        """What is wrong now; the newest first."""
        return tuple(sorted(self._firing.values(), key=lambda a: (-a.first_seen_s, a.id)))

    @property
    def resolved(self) -> tuple[Alert, ...]:
        """What is over; what ended last comes first."""
        return tuple(reversed(self._resolved))

    def observe(
        self, findings: Iterable[Finding], *, covered: Callable[[Finding], bool], now_s: float
    ) -> list[Alert]:
        """Takes in one look.

        Args:
            findings: All that was found.
            covered: Whether an older finding would have been found again by this look.
            now_s: Seconds since the Unix epoch.

        Returns:
            Alerts that have begun to fire or are over, to be told and kept.
        """
        found = {finding.key: finding for finding in findings}
        changes: list[Alert] = []
        for key, finding in found.items():
            changes += self._found(key, finding, now_s)
        for key in [k for k, p in self._pending.items() if k not in found and covered(p.finding)]:
            del self._pending[key]
        for key, alert in list(self._firing.items()):
            over = key not in found and covered(alert.finding)
            if over and now_s - alert.last_seen_s >= self._clear_after_s:
                changes.append(self._end(key, now_s))
        return changes

    def close(self, now_s: float) -> list[Alert]:
        """The epoch has ended: everything is over."""
        self._pending.clear()
        return [self._end(key, now_s) for key in list(self._firing)]

    def restore(self, alerts: Sequence[Alert]) -> None:
        """Goes on with alerts that fired before a restart of the control plane."""
        for alert in alerts:
            if alert.state is State.FIRING and alert.epoch == self._epoch:
                self._firing.setdefault(alert.finding.key, alert)

    def _found(self, key: str, finding: Finding, now_s: float) -> list[Alert]:
        alert = self._firing.get(key)
        if alert is not None:
            self._firing[key] = replace(
                alert, finding=finding, last_seen_s=now_s, seen_count=alert.seen_count + 1
            )
            return []
        pending = self._pending.setdefault(key, _Pending(finding, now_s))
        pending.finding = finding
        if now_s - pending.since_s < finding.hold_s:
            return []
        del self._pending[key]
        if len(self._firing) >= MAX_FIRING:
            self.dropped_count += 1
            return []
        self.fired_count += 1
        self._firing[key] = Alert(
            id=f"{self._job}-{self._epoch}-{self.fired_count}-{int(pending.since_s * 1000):x}",
            job=self._job,
            epoch=self._epoch,
            finding=finding,
            state=State.FIRING,
            first_seen_s=pending.since_s,
            last_seen_s=now_s,
        )
        return [self._firing[key]]

    def _end(self, key: str, now_s: float) -> Alert:
        ended = replace(self._firing.pop(key), state=State.RESOLVED, resolved_s=now_s)
        self._resolved.append(ended)
        return ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measured number, for the history."""

    job: str
    epoch: int
    name: str
    """step, step_time_s, stall_total_s (each by rank), norm (by tensor)."""
    subject: str
    """Rank as text, or the tensor's name."""
    step: int
    time_s: float
    """Seconds since the Unix epoch."""
    value: float


class AlertStore(Protocol):
    """Keeps alerts and history. Async methods raise ParamdErrors; none stops the event loop."""

    async def save_alerts(self, alerts: Sequence[Alert]) -> None:
        """Writes alerts anew or over their former state, by id."""

    async def load_firing(self, job: str, epoch: int) -> Sequence[Alert]:
        """Alerts of one epoch that fired when they were last written."""

    def offer(self, points: Sequence[Point]) -> None:
        """Takes in history. Never waits, never fails; drops what it cannot keep."""


class MemoryStore:
    """An `AlertStore` that forgets with its process."""

    def __init__(self) -> None:
        self.alerts: dict[str, Alert] = {}
        self.points: list[Point] = []

    async def save_alerts(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self.alerts[alert.id] = alert
        while len(self.alerts) > MAX_KEPT:
            del self.alerts[next(iter(self.alerts))]

    async def load_firing(self, job: str, epoch: int) -> Sequence[Alert]:
        return [
            alert
            for alert in self.alerts.values()
            if alert.state is State.FIRING and (alert.job, alert.epoch) == (job, epoch)
        ]

    def offer(self, points: Sequence[Point]) -> None:
        self.points = [*self.points, *points][-MAX_KEPT:]


class AlertDocument(BaseModel):
    """One trouble, from its first to its last sight."""

    id: str
    job: str
    epoch: int
    rule: str = Field(
        description="non-finite, norm-jump, replica-drift, stale-rank, stalled-rank, straggler, "
        "stall-budget, layout-mismatch or certificate"
    )
    subject: str = Field(description="What it is about: a rank, a tensor, the mesh")
    severity: str = Field(description="warning or critical")
    state: str = Field(description="firing or resolved")
    reason: str = Field(description="In words; names ranks and tensors, never values")
    ranks: list[int] = Field(description="Ranks it is about")
    fqn: str = Field(description="Tensor it is about; empty when about none")
    step: int = Field(description="Step it was last found at; -1 when about none")
    first_seen_s: float = Field(description="Seconds since the Unix epoch, as the next two")
    last_seen_s: float
    resolved_s: float | None = Field(description="null while it fires")
    seen_count: int = Field(description="How often it was found")


def document(alert: Alert) -> AlertDocument:
    """The alert for programs."""
    found = alert.finding
    return AlertDocument(
        id=alert.id,
        job=alert.job,
        epoch=alert.epoch,
        rule=found.rule.value,
        subject=found.subject,
        severity=found.severity.value,
        state=alert.state.value,
        reason=found.reason,
        ranks=list(found.ranks),
        fqn=found.fqn,
        step=found.step,
        first_seen_s=alert.first_seen_s,
        last_seen_s=alert.last_seen_s,
        resolved_s=alert.resolved_s,
        seen_count=alert.seen_count,
    )
