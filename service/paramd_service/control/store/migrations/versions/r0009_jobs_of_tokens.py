"""Tokens may be for some jobs alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"


def upgrade() -> None:
    """Add the column; those that there are stay for all jobs."""
    told = "patterns of the jobs that it is for; null: all"
    op.add_column("tokens", sa.Column("jobs", sa.Text, comment=told))
