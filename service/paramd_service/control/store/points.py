"""Stored metric history: points, roll-ups, and the statements that make and drop them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Table,
    and_,
    any_,
    delete,
    func,
    literal,
    literal_column,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

from paramd_service.control.store.retention import Drop, RollUp
from paramd_service.control.store.schema import metric_points, metric_series

_P = metric_points.c
_MS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesKey:
    """Identifies a series."""

    job: str
    epoch: int
    rank: int = -1
    """-1: the mesh as a whole."""
    name: str
    """At most 64 characters; ends in its unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One raw measurement."""

    series: SeriesKey
    time_s: float
    """Seconds since the Unix epoch; kept to the millisecond."""
    step: int = -1
    """-1: unknown."""
    value: float
    """NaN and infinities are counted, not stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Aggregate of one time bucket, or a single sample."""

    time_s: float
    """Start of the bucket, in seconds since the Unix epoch."""
    resolution_s: int
    """Its length; 0 for a sample."""
    step: int
    mean: float | None
    """Of the finite values; None when there are none."""
    min: float | None
    max: float | None
    count: int
    """Finite values."""
    nonfinite_count: int


def store_samples(
    connection: Connection, samples: Sequence[Sample], known: Mapping[SeriesKey, int]
) -> dict[SeriesKey, int]:
    """Insert samples; a second one for the same series and millisecond is ignored.

    Args:
        known: Ids of series from earlier, committed calls; may be empty.

    Returns:
        Ids of the series missing from `known`.
    """
    missing = {sample.series: None for sample in samples if sample.series not in known}
    learned = {key: _series_id(connection, key) for key in missing}
    rows = [
        _sample_row(known[key] if (key := sample.series) in known else learned[key], sample)
        for sample in samples
    ]
    connection.execute(_insert(connection, metric_points).on_conflict_do_nothing(), rows)
    return learned


def _series_id(connection: Connection, key: SeriesKey) -> int:
    values = {"job": key.job, "epoch": key.epoch, "rank": key.rank, "name": key.name}
    connection.execute(_insert(connection, metric_series).values(values).on_conflict_do_nothing())
    found: int = connection.execute(select(metric_series.c.id).where(_is_series(key))).scalar_one()
    return found


def roll_up(connection: Connection, step: RollUp) -> None:
    """Roll up inside the database. Idempotent: buckets that exist are kept."""
    width_ms = step.target_s * _MS
    bucket = _P.time_ms - _P.time_ms % literal_column(str(width_ms))
    sums = (
        select(
            _P.series_id,
            literal(step.target_s),
            bucket,
            func.max(_P.step),
            func.sum(_P.mean * _P.count) / func.nullif(func.sum(_P.count), 0),
            func.min(_P.min),
            func.max(_P.max),
            func.sum(_P.count),
            func.sum(_P.nonfinite_count),
        )
        .where(*_within(connection, step.source_s, step.end_s), _P.time_ms >= step.begin_s * _MS)
        .group_by(_P.series_id, bucket)
    )
    connection.execute(
        _insert(connection, metric_points)
        .from_select([column.name for column in metric_points.columns], sums)
        .on_conflict_do_nothing()
    )


def drop(connection: Connection, step: Drop) -> None:
    """Delete the points that are too old."""
    connection.execute(
        delete(metric_points).where(*_within(connection, step.resolution_s, step.before_s))
    )


def read_points(
    connection: Connection,
    series: SeriesKey,
    *,
    resolution_s: int,
    begin_s: float,
    end_s: float,
    limit: int,
) -> list[Point]:
    """The first `limit` points of one series within `[begin_s, end_s)`, ordered by time."""
    chosen = (
        select(metric_points)
        .join(metric_series, metric_series.c.id == _P.series_id)
        .where(
            _is_series(series),
            _P.resolution_s == resolution_s,
            _P.time_ms >= math.ceil(begin_s * _MS),
            _P.time_ms < math.ceil(end_s * _MS),
        )
        .order_by(_P.time_ms)
        .limit(limit)
    )
    return [_point(row) for row in connection.execute(chosen)]


def read_series(
    connection: Connection, job: str, epoch: int, *, after: tuple[str, int] | None, limit: int
) -> list[SeriesKey]:
    """The first `limit` series of an epoch after `after`, ordered by name and rank."""
    columns = metric_series.c
    chosen = (
        select(columns.name, columns.rank)
        .where(columns.job == job, columns.epoch == epoch)
        .order_by(columns.name, columns.rank)
        .limit(limit)
    )
    if after is not None:
        name, rank = after
        chosen = chosen.where(
            or_(columns.name > name, and_(columns.name == name, columns.rank > rank))
        )
    return [
        SeriesKey(job=job, epoch=epoch, rank=row.rank, name=row.name)
        for row in connection.execute(chosen)
    ]


def extremes(connection: Connection, resolution_s: int) -> tuple[int, int] | None:
    """Times of a resolution's oldest and newest points, in whole seconds; None without points."""
    chosen = select(func.min(_P.time_ms), func.max(_P.time_ms)).where(
        _of_any_series(connection), _P.resolution_s == resolution_s
    )
    oldest, newest = connection.execute(chosen).one()
    return None if oldest is None else (int(oldest) // _MS, int(newest) // _MS)


def _within(
    connection: Connection, resolution_s: int, end_s: int
) -> tuple[ColumnElement[bool], ...]:
    return (
        _of_any_series(connection),
        _P.resolution_s == resolution_s,
        _P.time_ms < end_s * _MS,
    )


def _of_any_series(connection: Connection) -> ColumnElement[bool]:
    """Always true. The key starts with the series: listing them all turns a scan into seeks."""
    every = select(metric_series.c.id)
    if connection.dialect.name == "postgresql":
        # IN would become a join, and a slow one while the server's statistics are stale.
        return _P.series_id == any_(func.array(every.scalar_subquery()))
    return _P.series_id.in_(every)


def _is_series(key: SeriesKey) -> ColumnElement[bool]:
    columns = metric_series.c
    return and_(
        columns.job == key.job,
        columns.epoch == key.epoch,
        columns.rank == key.rank,
        columns.name == key.name,
    )


def _insert(connection: Connection, table: Table) -> Any:
    """INSERT with ON CONFLICT: both dialects support it, SQLAlchemy's generic insert does not."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def _sample_row(series_id: int, sample: Sample) -> dict[str, object]:
    value = sample.value if math.isfinite(sample.value) else None
    return {
        "series_id": series_id,
        "resolution_s": 0,
        "time_ms": round(sample.time_s * _MS),
        "step": sample.step,
        "mean": value,
        "min": value,
        "max": value,
        "count": int(value is not None),
        "nonfinite_count": int(value is None),
    }


def _point(row: Row[Any]) -> Point:
    return Point(
        time_s=row.time_ms / _MS,
        resolution_s=row.resolution_s,
        step=row.step,
        mean=row.mean,
        min=row.min,
        max=row.max,
        # `row.count` is a method.
        count=row._mapping["count"],
        nonfinite_count=row.nonfinite_count,
    )
