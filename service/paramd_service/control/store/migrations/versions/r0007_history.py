"""One list of points for each series, instead of three resolutions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby

import sqlalchemy as sa
from alembic import op
from sqlalchemy import RowMapping

from paramd_service.control.store.thinning import Point, thin

revision: str = "0007"
down_revision: str | None = "0006"

MAX_POINTS = 2_048

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_COPIED = ("time_ms", "step", "mean", "min", "max", "count", "nonfinite_count")
_ORDER = "ORDER BY resolution_s, time_ms"


def upgrade() -> None:
    """Keep of each time what was known at the finest resolution, thinned where it is too much."""
    for name, kind, default, comment in (
        ("grid_ms", sa.BigInteger, "1", "of new ones"),
        ("newest_ms", sa.BigInteger, "0", "of samples"),
        ("point_count", sa.Integer, "0", None),
    ):
        op.add_column(
            "metric_series",
            sa.Column(name, kind, nullable=False, server_default=sa.text(default), comment=comment),
        )
    op.execute("CREATE TABLE metric_points_before AS SELECT * FROM metric_points")
    op.create_index("ix_metric_points_before", "metric_points_before", ["series_id"])
    op.drop_table("metric_points")
    points = _new_table()
    connection = op.get_bind()
    rows = sa.text(f"SELECT * FROM metric_points_before WHERE series_id = :of {_ORDER}")
    known = sa.text(
        "UPDATE metric_series SET grid_ms = :grid_ms, newest_ms = :newest_ms, "
        "point_count = :point_count WHERE id = :of"
    )
    for of in connection.execute(sa.text("SELECT id FROM metric_series")).scalars().all():
        found = _finest(connection.execute(rows, {"of": of}).mappings())
        if not found:
            continue
        kept, grid_ms = thin(found, 1, MAX_POINTS)
        connection.execute(sa.insert(points), [{"series_id": of, **asdict(one)} for one in kept])
        state = {"of": of, "grid_ms": grid_ms, "newest_ms": found[-1].end_ms - 1}
        connection.execute(known, {**state, "point_count": len(kept)})
    op.drop_table("metric_points_before")


def _new_table() -> sa.Table:
    return op.create_table(
        "metric_points",
        sa.Column("series_id", _ID, autoincrement=False),
        sa.Column("time_ms", sa.BigInteger, autoincrement=False, comment="begin of span"),
        sa.Column("span_ms", sa.BigInteger, nullable=False, comment="1: one moment"),
        sa.Column(
            "step", sa.BigInteger, nullable=False, comment="the highest within; -1: not known"
        ),
        sa.Column("mean", sa.Double, comment="of finite values; null: there was none"),
        sa.Column("min", sa.Double),
        sa.Column("max", sa.Double),
        sa.Column("count", sa.Integer, nullable=False, comment="finite values"),
        sa.Column("nonfinite_count", sa.Integer, nullable=False, comment="NaN and infinities"),
        sa.PrimaryKeyConstraint("series_id", "time_ms", name="pk_metric_points"),
        sa.ForeignKeyConstraint(
            ["series_id"],
            ["metric_series.id"],
            name="fk_metric_points_series_id",
            ondelete="CASCADE",
        ),
        sqlite_with_rowid=False,
    )


def _finest(rows: Iterable[RowMapping]) -> list[Point]:
    """Points in order of time; a coarser one only where no finer one had begun."""
    kept: list[Point] = []
    for resolution_s, coarser in groupby(rows, key=lambda row: row["resolution_s"]):
        before = [
            Point(span_ms=max(resolution_s * 1000, 1), **{name: row[name] for name in _COPIED})
            for row in coarser
            if not kept or row["time_ms"] < kept[0].time_ms
        ]
        # The last of these may reach into the finer ones, which it then sums up.
        end_ms = before[-1].end_ms if before else 0
        kept = before + [point for point in kept if point.time_ms >= end_ms]
    return kept
