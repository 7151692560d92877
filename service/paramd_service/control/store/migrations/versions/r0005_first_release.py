"""The tables of paramd 0.1.0. No store of before is upgraded, and a new one is not made by this."""

from __future__ import annotations

revision: str = "0005"
down_revision: str | None = None


def upgrade() -> None:
    """Nothing: upgrades begin with the next revision."""
