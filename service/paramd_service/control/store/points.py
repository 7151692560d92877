"""Metric history at rest: points, sums over them, and the statements that make and drop them."""

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
    """What a number is about."""

    job: str
    epoch: int
    rank: int = -1
    """-1: the mesh as a whole."""
    name: str
    """At most 64 characters; has its unit at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One number as it came."""

    series: SeriesKey
    time_s: float
    """Seconds since the Unix epoch; kept to the millisecond."""
    step: int = -1
    """-1: not known."""
    value: float
    """NaN and infinities are counted, not kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What is known of one stretch of time; a sample is a stretch of its own."""

    time_s: float
    """Begin of the stretch."""
    resolution_s: int
    """Its length; 0: a sample."""
    step: int
    mean: float | None
    """Of the finite values; None when there was none."""
    min: float | None
    max: float | None
    count: int
    """Finite values."""
    nonfinite_count: int


def store_samples(
    connection: Connection, samples: Sequence[Sample], known: Mapping[SeriesKey, int]
) -> dict[SeriesKey, int]:
    """Inserts samples; a second one of the same series and millisecond is left out.

    Args:
        known: ids of series, from earlier calls that were committed; may be empty.

    Returns:
        Ids of the series that `known` lacked.
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
    """Sums up, within the database. Doing it twice changes nothing."""
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
    """Removes what is too old."""
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
    """The first `limit` points of one series within `[begin_s, end_s)`, in order of time."""
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
    """The first `limit` series of an epoch, by name and rank, after the one of that name and
    rank."""
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
    """Times of the oldest and the newest point of a resolution, in whole seconds."""
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
    """Always true. The key begins with the series: naming them all turns a scan into seeks."""
    every = select(metric_series.c.id)
    if connection.dialect.name == "postgresql":
        # As IN it becomes a join, and a slow one while the server's statistics are old.
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
    """INSERT with ON CONFLICT, which both databases have and SQLAlchemy's common one lacks."""
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
        # `count` is a method of every row.
        count=row._mapping["count"],
        nonfinite_count=row.nonfinite_count,
    )
