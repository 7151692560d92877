"""The first tables: audit, tokens, alerts, metric history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "audit",
        sa.Column("job", sa.String(64), comment="empty: the site's own chain"),
        sa.Column("seq", sa.BigInteger, autoincrement=False, comment="1 and up, no gaps"),
        sa.Column("body", sa.Text, nullable=False, comment="canonical JSON, as it was hashed"),
        sa.Column("hash", sa.String(64), nullable=False, comment="sha256(hash before || body)"),
        sa.PrimaryKeyConstraint("job", "seq", name="pk_audit"),
        sqlite_with_rowid=False,
        comment="append-only; paramd/chain.py says how records are linked",
    )
    op.create_table(
        "tokens",
        sa.Column("name", sa.String(64)),
        sa.Column("digest", sa.String(64), nullable=False, comment="sha256 of the token"),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False, comment="seconds since the Unix epoch"),
        sa.Column("expires_s", sa.Double, comment="null: never"),
        sa.Column("revoked_s", sa.Double, comment="null: not revoked"),
        sa.PrimaryKeyConstraint("name", name="pk_tokens"),
        sa.UniqueConstraint("digest", name="uq_tokens_digest"),
        comment="users of the REST side; the tokens themselves are nowhere",
    )
    _alerts()
    _metrics()


def _alerts() -> None:
    op.create_table(
        "alerts",
        sa.Column("id", _ID, sa.Identity()),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False, comment="-1: the mesh as a whole"),
        sa.Column("step", sa.BigInteger, nullable=False, comment="-1: not known"),
        sa.Column("rule", sa.String(64), nullable=False),
        sa.Column("severity", sa.String(16), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False, comment="JSON object"),
        sa.Column("raised_s", sa.Double, nullable=False, comment="seconds since the Unix epoch"),
        sa.Column("updated_s", sa.Double, nullable=False),
        sa.Column("resolved_s", sa.Double, comment="null: still true"),
        sa.PrimaryKeyConstraint("id", name="pk_alerts"),
    )
    op.create_index("ix_alerts_job", "alerts", ["job", "id"])


def _metrics() -> None:
    op.create_table(
        "metric_series",
        sa.Column("id", _ID, sa.Identity()),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False, comment="-1: the mesh as a whole"),
        sa.Column("name", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_metric_series"),
        sa.UniqueConstraint("job", "epoch", "rank", "name", name="uq_metric_series_job"),
        comment="what a number is about; its points hold only the id",
    )
    op.create_table(
        "metric_points",
        sa.Column("series_id", _ID, autoincrement=False),
        sa.Column("resolution_s", sa.Integer, autoincrement=False, comment="0: as it came"),
        sa.Column("time_ms", sa.BigInteger, autoincrement=False, comment="begin of it"),
        sa.Column(
            "step", sa.BigInteger, nullable=False, comment="the last step within; -1: not known"
        ),
        sa.Column("mean", sa.Double, comment="of finite values; null: there was none"),
        sa.Column("min", sa.Double),
        sa.Column("max", sa.Double),
        sa.Column("count", sa.Integer, nullable=False, comment="finite values"),
        sa.Column("nonfinite_count", sa.Integer, nullable=False, comment="NaN and infinities"),
        sa.PrimaryKeyConstraint("series_id", "resolution_s", "time_ms", name="pk_metric_points"),
        sa.ForeignKeyConstraint(
            ["series_id"],
            ["metric_series.id"],
            name="fk_metric_points_series_id",
            ondelete="CASCADE",
        ),
        sqlite_with_rowid=False,
    )
