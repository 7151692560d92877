"""Placeholder."""

from __future__ import annotations

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: None = None
depends_on: None = None


def upgrade() -> None:
    """Do nothing."""
