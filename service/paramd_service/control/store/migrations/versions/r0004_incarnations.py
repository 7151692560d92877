"""What was called an epoch is called an incarnation."""

from __future__ import annotations

from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"


def upgrade() -> None:
    """Rename the columns, and the placeholder in what schedules export to."""
    for table in ("alerts", "metric_series", "exports", "edits"):
        # SQLite and PostgreSQL agree on this; Alembic would copy a table of SQLite's.
        op.execute(f"ALTER TABLE {table} RENAME COLUMN epoch TO incarnation")
    op.execute("ALTER TABLE export_schedules RENAME COLUMN rhythm TO cadence")
    if op.get_bind().dialect.name == "postgresql":
        comment = "of the incarnation, when it was applied; or -1"
        op.execute(f"COMMENT ON COLUMN edits.edits IS '{comment}'")
    op.execute("UPDATE export_schedules SET request = replace(request, '{epoch}', '{incarnation}')")
