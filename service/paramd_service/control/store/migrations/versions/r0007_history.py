"""One list of points for each series, instead of three resolutions.

The thinning of points is written out here: a released migration must not change with the code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import sqlalchemy as sa
from alembic import op
from sqlalchemy import RowMapping

revision: str = "0007"
down_revision: str | None = "0006"

MAX_POINTS = 2_048

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_COPIED = ("time_ms", "step", "mean", "min", "max", "count", "nonfinite_count")


class Point(NamedTuple):
    """A row of the new table: a series within one span of time."""

    time_ms: int
    span_ms: int
    step: int
    mean: float | None
    min: float | None
    max: float | None
    count: int  # type: ignore[assignment]
    nonfinite_count: int

    @property
    def end_ms(self) -> int:
        return self.time_ms + self.span_ms


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
        kept, grid_ms = _thin(found)
        connection.execute(sa.insert(points), [{"series_id": of, **one._asdict()} for one in kept])
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


def _thin(points: Sequence[Point]) -> tuple[Sequence[Point], int]:
    """At most `MAX_POINTS` points, and the span of their grid, a power of two of a millisecond."""
    if len(points) <= MAX_POINTS:
        return points, 1
    span_ms = 1
    while len({point.time_ms // span_ms for point in points}) > MAX_POINTS:
        span_ms *= 2
    grid = groupby(points, key=lambda point: point.time_ms // span_ms)
    return [_merged(list(within), place * span_ms, span_ms) for place, within in grid], span_ms


def _merged(points: list[Point], time_ms: int, span_ms: int) -> Point:
    if len(points) == 1 and points[0].span_ms >= span_ms:
        return points[0]
    count = sum(point.count for point in points)
    finite = [point for point in points if point.count]
    low = min((point.min for point in finite if point.min is not None), default=None)
    high = max((point.max for point in finite if point.max is not None), default=None)
    mean = None
    if low is not None and high is not None:
        # Weights first, so that no sum overflows; clamping removes rounding errors.
        parts = (point.mean * (point.count / count) for point in finite if point.mean is not None)
        mean = min(max(math.fsum(parts), low), high)
    return Point(
        time_ms=time_ms,
        span_ms=max(span_ms, points[-1].end_ms - time_ms),
        step=max(point.step for point in points),
        mean=mean,
        min=low,
        max=high,
        count=count,
        nonfinite_count=sum(point.nonfinite_count for point in points),
    )
