"""Exports and schedules keep which jobs their author's token is for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"

_TOLD = {
    "exports": "as in tokens, of who asked for it",
    "export_schedules": "as in tokens, of who made it",
}


def upgrade() -> None:
    """Add the columns; what is there gets the patterns of its author's token."""
    for table, told in _TOLD.items():
        op.add_column(table, sa.Column("jobs", sa.Text, comment=told))
        # A name is never given to a second token.
        author = f"SELECT tokens.jobs FROM tokens WHERE tokens.name = {table}.actor"
        op.execute(f"UPDATE {table} SET jobs = ({author})")
