"""One list of points for each series, instead of three resolutions."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: None = None
depends_on: None = None

MAX_POINTS = 2_048

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
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
        found = _finest([dict(row) for row in connection.execute(rows, {"of": of}).mappings()])
        if not found:
            continue
        newest_ms = found[-1]["time_ms"] + found[-1]["span_ms"] - 1
        found, grid_ms = _thinned(found)
        connection.execute(sa.insert(points), [{"series_id": of, **point} for point in found])
        state = {"of": of, "grid_ms": grid_ms, "newest_ms": newest_ms, "point_count": len(found)}
        connection.execute(known, state)
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


def _finest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points in order of time; a coarser one only where no finer one had begun."""
    kept: list[dict[str, Any]] = []
    for resolution_s, coarser in groupby(rows, key=lambda row: row.pop("resolution_s")):
        before = []
        for row in coarser:
            del row["series_id"]
            if not kept or row["time_ms"] < kept[0]["time_ms"]:
                before.append({**row, "span_ms": max(resolution_s * 1000, 1)})
        # The last of these may reach into the finer ones, which it then sums up.
        end_ms = before[-1]["time_ms"] + before[-1]["span_ms"] if before else 0
        kept = before + [row for row in kept if row["time_ms"] >= end_ms]
    return kept


def _thinned(points: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """At most `MAX_POINTS`, each of a span of a grid; and the length of the grid's spans."""
    grid_ms = 1
    while len({point["time_ms"] // grid_ms for point in points}) > MAX_POINTS:
        grid_ms *= 2
    spans = groupby(points, key=lambda point: point["time_ms"] // grid_ms)
    return [_merged(list(within), place * grid_ms, grid_ms) for place, within in spans], grid_ms


def _merged(points: list[dict[str, Any]], time_ms: int, grid_ms: int) -> dict[str, Any]:
    if len(points) == 1 and points[0]["span_ms"] >= grid_ms:
        return points[0]
    count = sum(point["count"] for point in points)
    finite = [point for point in points if point["count"]]
    low = min((point["min"] for point in finite), default=None)
    high = max((point["max"] for point in finite), default=None)
    mean = math.fsum(point["mean"] * (point["count"] / count) for point in finite)
    return {
        "time_ms": time_ms,
        "span_ms": max(grid_ms, points[-1]["time_ms"] + points[-1]["span_ms"] - time_ms),
        "step": max(point["step"] for point in points),
        "mean": min(max(mean, low), high) if finite else None,
        "min": low,
        "max": high,
        "count": count,
        "nonfinite_count": sum(point["nonfinite_count"] for point in points),
    }
