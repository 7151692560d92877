"""Exports, their files, their schedules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "exports",
        sa.Column("id", sa.String(32)),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("destination", sa.Text, nullable=False, comment="name/key"),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column(
            "schedule", sa.String(32), nullable=False, comment="empty: somebody asked for it"
        ),
        sa.Column("request", sa.Text, nullable=False, comment="JSON object"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False, comment="0: nothing is pinned"),
        sa.Column("step", sa.BigInteger, nullable=False, comment="-1: nothing is pinned"),
        sa.Column("plan", sa.LargeBinary, nullable=False, comment="paramd.v1.ExportPlan"),
        sa.Column("generation", sa.BigInteger, nullable=False, comment="of who runs it"),
        sa.Column("drop_owed", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("removed", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False, comment="seconds since the Unix epoch"),
        sa.Column("ended_s", sa.Double, comment="null: it goes on"),
        sa.PrimaryKeyConstraint("id", name="pk_exports"),
    )
    op.create_index("ix_exports_job", "exports", ["job", "created_s"])
    op.create_index("ix_exports_schedule", "exports", ["schedule"])
    _files()
    _schedules()


def _files() -> None:
    op.create_table(
        "export_files",
        sa.Column("export_id", sa.String(32)),
        sa.Column("name", sa.String(255)),
        sa.Column("number", sa.Integer, nullable=False, comment="place in the plan"),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("written_bytes", sa.BigInteger, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False, comment="-1: given to none"),
        sa.Column(
            "checksum", sa.String(32), nullable=False, comment="XXH3, 128 bit; empty: not whole"
        ),
        sa.Column("state", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("export_id", "name", name="pk_export_files"),
        sa.ForeignKeyConstraint(
            ["export_id"], ["exports.id"], name="fk_export_files_export_id", ondelete="CASCADE"
        ),
    )


def _schedules() -> None:
    op.create_table(
        "export_schedules",
        sa.Column("id", sa.String(32)),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("request", sa.Text, nullable=False, comment="JSON object"),
        sa.Column("rhythm", sa.Text, nullable=False, comment="JSON object"),
        sa.Column("last_step", sa.BigInteger, nullable=False, comment="of the last occasion"),
        sa.Column("last_s", sa.Double, nullable=False, comment="of the last occasion"),
        sa.Column("skipped_count", sa.Integer, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False, comment="seconds since the Unix epoch"),
        sa.Column("deleted_s", sa.Double, comment="null: in force"),
        sa.PrimaryKeyConstraint("id", name="pk_export_schedules"),
    )
    op.create_index("ix_export_schedules_job", "export_schedules", ["job"])
