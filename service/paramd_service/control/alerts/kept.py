"""Alerts and history stored in the control plane's database."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import xxhash

from paramd_service.control.alerts.book import Alert, Finding, Point, Severity, State
from paramd_service.control.alerts.config import Rule
from paramd_service.control.store.alerts import AlertRow
from paramd_service.control.store.alerts import AlertStore as AlertTable
from paramd_service.control.store.history import MetricHistory
from paramd_service.control.store.points import Sample, SeriesKey

MAX_NAME_CHARS = 64
MAX_TEXT_CHARS = 2000
MAX_OPEN = 1000
MAX_KNOWN = 10_000


class KeptAlerts:
    """Implements `alerts.store.AlertStore` over the tables of `control.store`."""

    def __init__(self, table: AlertTable, history: MetricHistory) -> None:
        """No I/O. Both are started and stopped by the caller."""
        self._table = table
        self._history = history
        self._row_ids: OrderedDict[str, int] = OrderedDict()

    async def save_alerts(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            row_id = self._row_ids.get(alert.id)
            row = row_of(alert)
            if row_id is None:
                self._knows(alert.id, await self._table.add(row))
            else:
                await self._table.replace(replace(row, id=row_id))

    async def load_firing(self, job: str, epoch: int) -> Sequence[Alert]:
        rows = await self._table.page(job, limit=MAX_OPEN, only_open=True)
        found: list[Alert] = []
        for row in rows:
            alert = alert_of(row) if row.epoch == epoch else None
            if alert is not None:
                self._knows(alert.id, row.id)
                found.append(alert)
        return found

    def offer(self, points: Sequence[Point]) -> None:
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
        return SeriesKey(job=point.job, epoch=point.epoch, rank=int(point.subject), name=point.name)
    return SeriesKey(job=point.job, epoch=point.epoch, name=series_name(point.name, point.subject))


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
        epoch=alert.epoch,
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
            epoch=row.epoch,
            finding=finding,
            state=State.FIRING if row.resolved_s is None else State.RESOLVED,
            first_seen_s=row.raised_s,
            last_seen_s=row.updated_s,
            resolved_s=row.resolved_s,
            seen_count=int(row.detail["seen_count"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
