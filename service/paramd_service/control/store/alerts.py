"""Stored alerts: raised, updated, resolved; never removed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, insert, select, update

from paramd.errors import NotFoundError
from paramd_service.control.store.schema import alerts
from paramd_service.control.store.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertRow:
    """One alert."""

    id: int = 0
    """Assigned by the store in rising order; 0 before that."""
    job: str
    incarnation: int
    rank: int = -1
    """-1: the mesh as a whole."""
    step: int = -1
    """-1: unknown."""
    rule: str
    """Name of the rule, at most 64 characters."""
    severity: str
    text: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serializable."""
    raised_s: float
    """Seconds since the Unix epoch."""
    updated_s: float
    resolved_s: float | None = None
    """None: still firing."""


class AlertStore:
    """Reads and writes the table. All methods raise StoreError when it cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, row: AlertRow) -> int:
        """Add an alert and return its id."""
        values = _values(row)
        statement = insert(alerts).values(values).returning(alerts.c.id)
        return await self._store.write(
            lambda connection: connection.execute(statement).scalar_one()
        )

    async def replace(self, row: AlertRow) -> None:
        """Overwrite an alert by id. Raises NotFoundError."""
        statement = update(alerts).where(alerts.c.id == row.id).values(_values(row))
        changed = await self._store.write(lambda connection: connection.execute(statement).rowcount)
        if not changed:
            raise NotFoundError(f"alert {row.id} does not exist")

    async def page(
        self,
        job: str,
        *,
        limit: int,
        before_id: int | None = None,
        only_open: bool = False,
        only_resolved: bool = False,
        incarnation: int | None = None,
    ) -> list[AlertRow]:
        """A job's alerts, newest first; `before_id` continues from a previous page. With
        `incarnation` None, those of all incarnations."""
        chosen = select(alerts).where(alerts.c.job == job).order_by(alerts.c.id.desc()).limit(limit)
        if before_id is not None:
            chosen = chosen.where(alerts.c.id < before_id)
        if incarnation is not None:
            chosen = chosen.where(alerts.c.incarnation == incarnation)
        if only_resolved:
            chosen = chosen.where(alerts.c.resolved_s.is_not(None))
        if only_open:
            chosen = chosen.where(alerts.c.resolved_s.is_(None))
        rows = await self._store.read(lambda connection: connection.execute(chosen).all())
        return [_alert(row) for row in rows]


def _values(row: AlertRow) -> dict[str, object]:
    return {
        "job": row.job,
        "incarnation": row.incarnation,
        "rank": row.rank,
        "step": row.step,
        "rule": row.rule,
        "severity": row.severity,
        "text": row.text,
        "detail": json.dumps(dict(row.detail), sort_keys=True),
        "raised_s": row.raised_s,
        "updated_s": row.updated_s,
        "resolved_s": row.resolved_s,
    }


def _alert(row: Row[Any]) -> AlertRow:
    return AlertRow(
        id=row.id,
        job=row.job,
        incarnation=row.incarnation,
        rank=row.rank,
        step=row.step,
        rule=row.rule,
        severity=row.severity,
        text=row.text,
        detail=json.loads(row.detail),
        raised_s=row.raised_s,
        updated_s=row.updated_s,
        resolved_s=row.resolved_s,
    )
