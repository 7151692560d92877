"""Edits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "edits",
        sa.Column("number", _ID, sa.Identity(), comment="rises with every new edit"),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False, comment="seconds since the Unix epoch"),
        sa.Column("ended_s", sa.Double, comment="null: it goes on"),
        sa.Column("boundary", sa.BigInteger, nullable=False, comment="0: never committed"),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False, comment="-1: not applied"),
        sa.Column(
            "edits",
            sa.BigInteger,
            nullable=False,
            comment="of the epoch, when it was applied; or -1",
        ),
        sa.Column("stop_ns", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column(
            "manifest", sa.LargeBinary, nullable=False, comment="paramd.v1.EditManifest, zlib"
        ),
        sa.Column("digest", sa.String(32), nullable=False, comment="XXH3-128 of the manifest"),
        sa.Column("detail", sa.Text, nullable=False, comment="JSON object"),
        sa.Column("undo_of", sa.String(32), nullable=False, comment="empty: it undoes none"),
        sa.Column("undone_by", sa.String(32), nullable=False, comment="empty: not undone"),
        sa.PrimaryKeyConstraint("number", name="pk_edits"),
        sa.UniqueConstraint("id", name="uq_edits_id"),
        comment="never removed",
    )
    op.create_index("ix_edits_job", "edits", ["job", "number"])
