"""The alerts of one mesh and their storage.

    nothing --found--> PENDING --found for `hold_s`--> FIRING --not found--> RESOLVED

Findings repeat; one alert is kept per key, so nothing is reported twice. A finding that returns
after its alert was resolved starts a new one. Book does no I/O and has no clock; KeptAlerts
stores alerts and history in the control plane's database.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import xxhash
from pydantic import BaseModel, Field

from paramd_service.control.alerts.config import Rule
from paramd_service.control.store.alerts import AlertRow, AlertStore
from paramd_service.control.store.history import MetricHistory, Sample, SeriesKey
from paramd_service.control.store.silences import SilenceStore

MAX_FIRING = 1000
"""Most firing alerts; more are counted, not kept."""

MAX_RESOLVED = 500
"""Resolved alerts kept in memory; the store keeps them longer."""

MAX_NAME_CHARS = 64
MAX_TEXT_CHARS = 2000
MAX_OPEN = 1000
MAX_KNOWN = 10_000


class Severity(StrEnum):
    """How serious an alert is."""

    WARNING = "warning"
    CRITICAL = "critical"


class State(StrEnum):
    """State of an alert."""

    FIRING = "firing"
    RESOLVED = "resolved"


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
    hold_s: float = 0.0
    """Seconds it must persist before it fires."""

    @property
    def key(self) -> str:
        """Findings with equal keys are the same problem."""
        return f"{self.rule.value}/{self.subject}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One problem while it lasts. Times are in seconds since the Unix epoch."""

    id: str
    job: str
    incarnation: int
    finding: Finding
    """As last found."""
    state: State
    first_seen_s: float
    last_seen_s: float
    resolved_s: float | None = None
    seen_count: int = 1
    acknowledged_by: str = ""
    """Who has seen it; empty while nobody has."""
    acknowledged_s: float | None = None
    note: str = ""
    """What they said about it."""


@dataclass(slots=True)
class _Pending:
    finding: Finding
    since_s: float


class Book:
    """The alerts of one job in one incarnation."""

    def __init__(self, *, job: str, incarnation: int, clear_after_s: float) -> None:
        self._job = job
        self._incarnation = incarnation
        self._clear_after_s = clear_after_s
        self._firing: dict[str, Alert] = {}
        self._pending: dict[str, _Pending] = {}
        self._resolved: deque[Alert] = deque(maxlen=MAX_RESOLVED)
        self.fired_count = 0
        """Alerts that have ever fired."""
        self.dropped_count = 0
        """Alerts dropped because there were too many."""

    @property
    def firing(self) -> tuple[Alert, ...]:
        """Firing alerts, newest first."""
        return tuple(sorted(self._firing.values(), key=lambda a: (-a.first_seen_s, a.id)))

    @property
    def resolved(self) -> tuple[Alert, ...]:
        """Resolved alerts, most recently resolved first."""
        return tuple(reversed(self._resolved))

    def observe(
        self, findings: Iterable[Finding], *, covered: Callable[[Finding], bool], now_s: float
    ) -> list[Alert]:
        """Process the findings of one check.

        Args:
            findings: Everything found.
            covered: Whether this check would have found an older finding again.
            now_s: Seconds since the Unix epoch.

        Returns:
            Alerts that started firing or were resolved, to be reported and stored.
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
        """Resolve everything because the incarnation has ended; return what was firing."""
        self._pending.clear()
        return [self._end(key, now_s) for key in list(self._firing)]

    def acknowledge(self, ids: Iterable[str], *, by: str, note: str, now_s: float) -> list[Alert]:
        """Note who has seen these alerts; return those that are firing, as they are now."""
        wanted = set(ids)
        changed: list[Alert] = []
        for key, alert in self._firing.items():
            if alert.id in wanted:
                self._firing[key] = replace(
                    alert, acknowledged_by=by, acknowledged_s=now_s, note=note
                )
                changed.append(self._firing[key])
        return changed

    def restore(self, alerts: Sequence[Alert]) -> None:
        """Resume alerts that were firing before a restart of the control plane."""
        for alert in alerts:
            if alert.state is State.FIRING and alert.incarnation == self._incarnation:
                self._firing.setdefault(alert.finding.key, alert)

    def _found(self, key: str, finding: Finding, now_s: float) -> list[Alert]:
        alert = self._firing.get(key)
        if alert is not None:
            if alert.finding.severity is not finding.severity is Severity.CRITICAL:
                # Whoever acknowledged it has not seen this.
                alert = replace(alert, acknowledged_by="", acknowledged_s=None, note="")
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
            id=f"{self._job}-{self._incarnation}-{self.fired_count}-{int(1e3 * pending.since_s):x}",
            job=self._job,
            incarnation=self._incarnation,
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
    """One measurement for the history."""

    job: str
    incarnation: int
    name: str
    """step, step_time_s, stall_total_s (all by rank) or norm (by tensor)."""
    subject: str
    """Rank as text, or the tensor's name."""
    step: int
    time_s: float
    """Seconds since the Unix epoch."""
    value: float


class AlertDocument(BaseModel):
    """One problem, from when it was first found until it was last found."""

    id: str
    job: str
    incarnation: int
    rule: str = Field(
        description="non-finite, norm-jump, replica-drift, stale-rank, stalled-rank, straggler, "
        "stall-budget, layout-mismatch or certificate"
    )
    subject: str = Field(description="What it concerns: a rank, a tensor, the mesh")
    severity: str = Field(description="warning or critical")
    state: str = Field(description="firing or resolved")
    reason: str = Field(description="In words; names ranks and tensors, never values")
    ranks: list[int] = Field(description="Ranks it concerns")
    name: str = Field(description="Tensor it concerns; empty for none")
    step: int = Field(description="Step it was last found at; -1 for none")
    first_seen_s: float = Field(description="Seconds since the Unix epoch, as the next two")
    last_seen_s: float
    resolved_s: float | None = Field(description="null while it fires")
    seen_count: int = Field(description="How often it was found")
    acknowledged_by: str = Field(description="Who acknowledged it; empty: nobody")
    acknowledged_s: float | None = Field(description="Seconds since the Unix epoch, or null")
    note: str = Field(description="Of who acknowledged it")
    silenced: bool = Field(description="Whether a silence covers it now")


def document(alert: Alert, *, silenced: bool = False) -> AlertDocument:
    """The alert as a REST document."""
    found = alert.finding
    return AlertDocument(
        id=alert.id,
        job=alert.job,
        incarnation=alert.incarnation,
        rule=found.rule.value,
        subject=found.subject,
        severity=found.severity.value,
        state=alert.state.value,
        reason=found.reason,
        ranks=list(found.ranks),
        name=found.fqn,
        step=found.step,
        first_seen_s=alert.first_seen_s,
        last_seen_s=alert.last_seen_s,
        resolved_s=alert.resolved_s,
        seen_count=alert.seen_count,
        acknowledged_by=alert.acknowledged_by,
        acknowledged_s=alert.acknowledged_s,
        note=alert.note,
        silenced=silenced,
    )


class KeptAlerts:
    """Stores alerts and history in the database. Async methods raise StoreError."""

    def __init__(self, table: AlertStore, history: MetricHistory, silences: SilenceStore) -> None:
        """No I/O. All are started and stopped by the caller."""
        self._table = table
        self.silences = silences
        self._history = history
        self._row_ids: OrderedDict[str, int] = OrderedDict()

    async def save_alerts(self, alerts: Sequence[Alert]) -> None:
        """Insert or overwrite alerts by id."""
        for alert in alerts:
            row_id = self._row_ids.get(alert.id)
            row = row_of(alert)
            if row_id is None:
                self._knows(alert.id, await self._table.add(row))
            else:
                await self._table.replace(replace(row, id=row_id))

    async def load_firing(self, job: str, incarnation: int) -> Sequence[Alert]:
        """Alerts of one incarnation that were firing when last written."""
        rows = await self._table.page(job, limit=MAX_OPEN, only_open=True)
        found: list[Alert] = []
        for row in rows:
            alert = alert_of(row) if row.incarnation == incarnation else None
            if alert is not None:
                self._knows(alert.id, row.id)
                found.append(alert)
        return found

    def offer(self, points: Sequence[Point]) -> None:
        """Add to the history. Never blocks, never fails; drops what it cannot keep."""
        self._history.offer(
            Sample(series=series_of(point), time_s=point.time_s, step=point.step, value=point.value)
            for point in points
        )

    def _knows(self, alert_id: str, row_id: int) -> None:
        self._row_ids[alert_id] = row_id
        if len(self._row_ids) > MAX_KNOWN:
            self._row_ids.popitem(last=False)


def series_of(point: Point) -> SeriesKey:
    """The history series of a point: ranks by number, tensors as part of the name."""
    if point.subject.isdecimal() and point.name != "norm":
        return SeriesKey(
            job=point.job, incarnation=point.incarnation, rank=int(point.subject), name=point.name
        )
    return SeriesKey(
        job=point.job, incarnation=point.incarnation, name=series_name(point.name, point.subject)
    )


def subject_of(series: SeriesKey) -> tuple[str, str]:
    """(name, subject) of a series, inverse of `series_of`. A truncated subject stays truncated
    and still names the same series."""
    if series.rank >= 0:
        return series.name, str(series.rank)
    name, _, subject = series.name.partition(":")
    return name, subject


def series_name(name: str, subject: str) -> str:
    """E.g. "norm:layers.0.weight"; a long subject is truncated and ends in a digest of it."""
    whole = f"{name}:{subject}"
    if len(whole) <= MAX_NAME_CHARS:
        return whole
    digest = xxhash.xxh3_64_hexdigest(subject.encode())
    return f"{whole[: MAX_NAME_CHARS - 17]}~{digest}"


def row_of(alert: Alert) -> AlertRow:
    """The alert as a table row; fields without a column go into `detail`."""
    found = alert.finding
    return AlertRow(
        job=alert.job,
        incarnation=alert.incarnation,
        rank=found.ranks[0] if len(found.ranks) == 1 else -1,
        step=found.step,
        rule=found.rule.value,
        severity=found.severity.value,
        text=found.reason[:MAX_TEXT_CHARS],
        detail={
            "id": alert.id,
            "subject": found.subject,
            "fqn": found.fqn,
            "ranks": list(found.ranks),
            "seen_count": alert.seen_count,
            "acknowledged_by": alert.acknowledged_by,
            "acknowledged_s": alert.acknowledged_s,
            "note": alert.note,
        },
        raised_s=alert.first_seen_s,
        updated_s=alert.last_seen_s,
        resolved_s=alert.resolved_s,
    )


def alert_of(row: AlertRow) -> Alert | None:
    """The alert in a row; None when another version wrote it in an unreadable form."""
    try:
        finding = Finding(
            rule=Rule(row.rule),
            subject=str(row.detail["subject"]),
            severity=Severity(row.severity),
            reason=row.text,
            ranks=tuple(int(rank) for rank in row.detail["ranks"]),
            fqn=str(row.detail["fqn"]),
            step=row.step,
        )
        return Alert(
            id=str(row.detail["id"]),
            job=row.job,
            incarnation=row.incarnation,
            finding=finding,
            state=State.FIRING if row.resolved_s is None else State.RESOLVED,
            first_seen_s=row.raised_s,
            last_seen_s=row.updated_s,
            resolved_s=row.resolved_s,
            seen_count=int(row.detail["seen_count"]),
            # Absent in rows of versions that knew no acknowledging.
            acknowledged_by=str(row.detail.get("acknowledged_by", "")),
            acknowledged_s=row.detail.get("acknowledged_s"),
            note=str(row.detail.get("note", "")),
        )
    except (KeyError, TypeError, ValueError):
        return None
