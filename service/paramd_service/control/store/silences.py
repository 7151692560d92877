"""Stored silences of alerts; never removed, so that one can tell later who heard nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import insert, select, update

from paramd_service.control.store.schema import alert_silences
from paramd_service.control.store.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """Alerts of a rule and subject that nobody wants to hear of for a while.

    Times are in seconds since the Unix epoch.
    """

    id: str
    job: str
    rule: str
    """Empty: every rule."""
    subject: str
    """Empty: every subject."""
    actor: str
    note: str
    created_s: float
    until_s: float
    ended_s: float | None = None
    """When it was ended early; None: it lasts until `until_s`."""

    def covers(self, rule: str, subject: str, now_s: float) -> bool:
        """Whether it is in force for an alert of this rule and subject."""
        return (
            self.ended_s is None
            and now_s < self.until_s
            and self.rule in ("", rule)
            and self.subject in ("", subject)
        )


class SilenceStore:
    """Reads and writes the table. All methods raise StoreError when it cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, silence: Silence) -> None:
        """Add a silence."""
        statement = insert(alert_silences).values(asdict(silence))
        await self._store.write(lambda connection: connection.execute(statement))

    async def end(self, silence_id: str, now_s: float) -> None:
        """End a silence now. Idempotent."""
        statement = (
            update(alert_silences)
            .where(alert_silences.c.id == silence_id, alert_silences.c.ended_s.is_(None))
            .values(ended_s=now_s)
        )
        await self._store.write(lambda connection: connection.execute(statement))

    async def in_force(self, job: str, now_s: float) -> list[Silence]:
        """A job's silences that are in force, oldest first."""
        chosen = (
            select(alert_silences)
            .where(
                alert_silences.c.job == job,
                alert_silences.c.ended_s.is_(None),
                alert_silences.c.until_s > now_s,
            )
            .order_by(alert_silences.c.created_s)
        )
        rows = await self._store.read(lambda connection: connection.execute(chosen).all())
        return [Silence(**row._mapping) for row in rows]
