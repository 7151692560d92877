"""Schedules export by steps alone; those by time have ended."""

from __future__ import annotations

import json
import time
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"

_SCHEDULES = sa.table(
    "export_schedules",
    *map(sa.column, ("id", "job", "actor", "request", "cadence", "created_s", "deleted_s")),
)
_EXPORTS = sa.table(
    "exports",
    *map(sa.column, ("id", "job", "destination", "format", "actor", "schedule", "request")),
    *map(sa.column, ("state", "reason", "incarnation", "step", "plan", "generation")),
    *map(sa.column, ("drop_owed", "removed", "created_s", "ended_s")),
)


def upgrade() -> None:
    """End schedules by time; drop what only they needed."""
    connection = op.get_bind()
    for row in connection.execute(sa.select(_SCHEDULES)).all():
        cadence = json.loads(row.cadence)
        every_s = cadence.pop("every_s", None)
        if every_s is not None and row.deleted_s is None:
            _end(connection, row, every_s)
        else:
            this = sa.update(_SCHEDULES).where(_SCHEDULES.c.id == row.id)
            connection.execute(this.values(cadence=json.dumps(cadence, sort_keys=True)))
    op.execute("ALTER TABLE export_schedules DROP COLUMN last_s")


def _end(connection: sa.Connection, row: Any, every_s: float) -> None:
    """End a schedule, and say why where its owner looks for its exports: in their list."""
    now_s = time.time()
    this = sa.update(_SCHEDULES).where(_SCHEDULES.c.id == row.id)
    connection.execute(this.values(deleted_s=now_s))
    request = json.loads(row.request)
    told = sa.insert(_EXPORTS).values(
        id=row.id,  # unique, and no export has it
        job=row.job,
        destination=request["destination"],
        format=request.get("format", "safetensors"),
        actor=row.actor,
        schedule=row.id,
        request=row.request,
        state="CANCELLED",
        reason=f"the schedule {row.id} (every {every_s:g} s) has ended: schedules are by steps "
        "alone; for every so many seconds run `paramd export` from cron (docs/exports.md)",
        incarnation=0,
        step=-1,
        plan=b"",
        generation=0,
        drop_owed=False,
        removed=False,
        created_s=now_s,
        ended_s=now_s,
    )
    connection.execute(told)
