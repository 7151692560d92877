"""Alerts and their table: raised, resolved, never removed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum

from sqlalchemy import Connection, insert, select, update

from paramd.documents import read_document
from paramd.mesh.insight.reports import Alert
from paramd_service.control.store.schema import alerts
from paramd_service.control.store.store import Store

MAX_FIRING = 1000
"""Most firing alerts kept of an incarnation."""


class State(StrEnum):
    FIRING = "firing"
    RESOLVED = "resolved"


class AlertStore:
    """Reads and writes the table. All methods raise StoreError when it cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def save(self, changed: Sequence[Alert]) -> None:
        """Insert or overwrite alerts by id, all or none."""

        def write(connection: Connection) -> None:
            for alert in changed:
                body = asdict(alert)
                values = {name: body[name] for name in ("id", "job", "incarnation", "resolved_s")}
                values["body"] = json.dumps(body)
                known = update(alerts).where(alerts.c.id == alert.id).values(values)
                if not connection.execute(known).rowcount:
                    connection.execute(insert(alerts).values(values))

        await self._store.write(write)

    async def load_firing(self, job: str, incarnation: int) -> Sequence[Alert]:
        """Alerts of one incarnation that were firing when last written."""
        found = await self.page(job, limit=MAX_FIRING, state=State.FIRING, incarnation=incarnation)
        return [alert for _, alert in found]

    async def page(
        self,
        job: str,
        *,
        limit: int,
        incarnation: int,
        before: int | None = None,
        state: State | None = None,
    ) -> list[tuple[int, Alert]]:
        """Alerts of one incarnation with their numbers in the table, newest first; with `before`,
        only those with lower numbers."""
        row = alerts.c
        chosen = (
            select(row.number, row.body)
            .where(row.job == job, row.incarnation == incarnation)
            .order_by(row.number.desc())
            .limit(limit)
        )
        if before is not None:
            chosen = chosen.where(row.number < before)
        if state is not None:
            firing = row.resolved_s.is_(None)
            chosen = chosen.where(firing if state is State.FIRING else ~firing)
        found = await self._store.all(chosen)
        # Alerts that were stored before suspects were looked for name none.
        return [
            (number, read_document(Alert, {"suspect": None} | json.loads(body)))
            for number, body in found
        ]
