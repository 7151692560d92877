"""Alerts and their table: raised, resolved, never removed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, insert, select, update

from paramd_service.control.store.schema import alerts
from paramd_service.control.store.store import Store

MAX_FIRING = 1000
"""Most firing alerts of an incarnation; more are not kept."""


class State(StrEnum):
    """State of an alert."""

    FIRING = "firing"
    RESOLVED = "resolved"


class Alert(BaseModel):
    """One problem, from when it was first found until it was last found.

    REST, the events, webhooks and the store all have it in this form.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    job: str
    incarnation: int
    rule: str = Field(
        description="non-finite, norm-jump, replica-drift, stale-rank, stalled-rank, straggler, "
        "stall-budget, layout-mismatch, certificate or logged-number"
    )
    subject: str = Field(description="What it concerns: a rank, a tensor, the mesh")
    severity: str = Field(description="warning or critical")
    state: str = Field(description="firing or resolved")
    reason: str = Field(description="In words; names ranks and tensors, never values")
    ranks: tuple[int, ...] = Field(description="Ranks it concerns")
    name: str = Field(description="Tensor it concerns; empty for none")
    step: int = Field(description="Step it was last found at; -1 for none")
    first_seen_s: float = Field(description="Seconds since the Unix epoch, as the next two")
    last_seen_s: float
    resolved_s: float | None = Field(description="null while it fires")


class AlertStore:
    """Reads and writes the table. All methods raise StoreError when it cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def save(self, changed: Sequence[Alert]) -> None:
        """Insert or overwrite alerts by id, all or none."""

        def write(connection: Connection) -> None:
            for alert in changed:
                values = {
                    "id": alert.id,
                    "job": alert.job,
                    "incarnation": alert.incarnation,
                    "resolved_s": alert.resolved_s,
                    "body": alert.model_dump_json(),
                }
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
        before: int | None = None,
        state: State | None = None,
        incarnation: int | None = None,
    ) -> list[tuple[int, Alert]]:
        """A job's alerts with their numbers in the table, newest first.

        Args:
            before: Only alerts with a lower number: continues from a previous page.
            state: None for both.
            incarnation: None for all.
        """
        row = alerts.c
        chosen = (
            select(row.number, row.body)
            .where(row.job == job)
            .order_by(row.number.desc())
            .limit(limit)
        )
        if before is not None:
            chosen = chosen.where(row.number < before)
        if incarnation is not None:
            chosen = chosen.where(row.incarnation == incarnation)
        if state is not None:
            firing = row.resolved_s.is_(None)
            chosen = chosen.where(firing if state is State.FIRING else ~firing)
        found = await self._store.all(chosen)
        return [(number, Alert.model_validate_json(body)) for number, body in found]
