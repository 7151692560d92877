"""A placeholder."""

from __future__ import annotations

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: None = None
depends_on: None = None


def upgrade() -> None:
    """Nothing yet."""
