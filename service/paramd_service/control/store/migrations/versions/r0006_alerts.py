"""An alert is stored as the document that REST shows; silences go."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"

_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Drop the silences; write the alerts anew, with their numbers."""
    connection = op.get_bind()
    op.drop_index("ix_alert_silences_job", "alert_silences")
    op.drop_table("alert_silences")
    # Read whole before the table goes: a hundred thousand alerts are some 50 MB.
    rows = [dict(row._mapping) for row in connection.execute(sa.text("SELECT * FROM alerts"))]
    op.drop_index("ix_alerts_job", "alerts")
    op.drop_table("alerts")
    table = op.create_table(
        "alerts",
        sa.Column(
            "number", _Id, sa.Identity(), nullable=False, comment="rises with every new alert"
        ),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column(
            "resolved_s", sa.Double, comment="seconds since the Unix epoch; null: still true"
        ),
        sa.Column("body", sa.Text, nullable=False, comment="the alert, as JSON"),
        sa.PrimaryKeyConstraint("number", name="pk_alerts"),
        sa.UniqueConstraint("id", name="uq_alerts_id"),
        comment="never removed",
    )
    op.create_index("ix_alerts_job", "alerts", ["job", "number"])
    rows.sort(key=lambda row: int(row["id"]))
    # Of rows with one id, which a write that failed halfway left, the last one.
    kept = {values["id"]: values for values in map(_values, rows)}
    for values in kept.values():
        # Numbers are given anew: one that is set by hand would be given again on PostgreSQL.
        connection.execute(sa.insert(table).values(values))


def _values(row: dict[str, Any]) -> dict[str, Any]:
    detail = json.loads(row["detail"])
    rank = int(row["rank"])
    alert = {
        "id": str(detail.get("id") or f"{row['job']}-{row['incarnation']}-{row['id']}-0"),
        "job": row["job"],
        "incarnation": row["incarnation"],
        "rule": row["rule"],
        "subject": detail.get("subject", ""),
        "severity": row["severity"],
        "state": "firing" if row["resolved_s"] is None else "resolved",
        "reason": row["text"],
        "ranks": detail.get("ranks", [] if rank < 0 else [rank]),
        "name": detail.get("fqn", ""),
        "step": row["step"],
        "first_seen_s": row["raised_s"],
        "last_seen_s": row["updated_s"],
        "resolved_s": row["resolved_s"],
    }
    kept = {key: alert[key] for key in ("id", "job", "incarnation", "resolved_s")}
    return kept | {"body": json.dumps(alert)}
