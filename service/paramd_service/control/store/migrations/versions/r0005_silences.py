"""Silences of alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "alert_silences",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("rule", sa.String(64), nullable=False, comment="empty: every rule"),
        sa.Column("subject", sa.Text, nullable=False, comment="empty: every subject"),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False, comment="seconds since the Unix epoch"),
        sa.Column("until_s", sa.Double, nullable=False),
        sa.Column("ended_s", sa.Double, comment="null: it ended, or ends, at until_s"),
        sa.PrimaryKeyConstraint("id", name="pk_alert_silences"),
    )
    op.create_index("ix_alert_silences_job", "alert_silences", ["job"])
