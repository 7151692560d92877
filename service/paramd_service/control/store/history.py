"""Metric history: buffer samples without blocking, write them once a second, downsample."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

from paramd.clock import now_s
from paramd_service.control.store.engine import StoreError
from paramd_service.control.store.retention import TIERS, Drop, RollUp, Tier, plan, tier_for
from paramd_service.control.store.schema import metric_points, metric_series
from paramd_service.control.store.store import Store

FLUSH_S = 1.0
SWEEP_S = 60.0
MAX_BUFFERED = 100_000
"""Most samples waiting to be written; more are dropped and counted."""
BATCH = 2_000
"""Samples per write: small, so that an audit record queued behind it does not wait long."""
MAX_SERIES_KNOWN = 100_000

_P = metric_points.c
_MS = 1000

log = logging.getLogger("paramd.control.store")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesKey:
    """Identifies a series."""

    job: str
    incarnation: int
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
    values = {"job": key.job, "incarnation": key.incarnation, "rank": key.rank, "name": key.name}
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
    connection: Connection, job: str, incarnation: int, *, after: tuple[str, int] | None, limit: int
) -> list[SeriesKey]:
    """The first `limit` series of an incarnation after `after`, ordered by name and rank."""
    columns = metric_series.c
    chosen = (
        select(columns.name, columns.rank)
        .where(columns.job == job, columns.incarnation == incarnation)
        .order_by(columns.name, columns.rank)
        .limit(limit)
    )
    if after is not None:
        name, rank = after
        chosen = chosen.where(
            or_(columns.name > name, and_(columns.name == name, columns.rank > rank))
        )
    return [
        SeriesKey(job=job, incarnation=incarnation, rank=row.rank, name=row.name)
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
        columns.incarnation == key.incarnation,
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


class MetricHistory:
    """Buffered writer and reader of series. Single event loop; `start` to `stop` must lie within
    the store's."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = now_s,
        tiers: tuple[Tier, ...] = TIERS,
    ) -> None:
        self._store = store
        self._clock = clock
        self._tiers = tiers
        self._samples: list[Sample] = []
        self._series: dict[SeriesKey, int] = {}
        self._rolled_s: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None
        self.dropped_count = 0
        """Samples lost because the buffer was full or the store unavailable."""

    def offer(self, samples: Iterable[Sample]) -> None:
        """Buffer samples. Never blocks, never fails."""
        for sample in samples:
            if len(self._samples) >= MAX_BUFFERED:
                self.dropped_count += 1
            else:
                self._samples.append(sample)

    async def read(
        self, series: SeriesKey, *, begin_s: float, end_s: float, limit: int = 10_000
    ) -> list[Point]:
        """Points of one series within `[begin_s, end_s)`, at the finest resolution still kept.

        Raises:
            StoreError: the store cannot be read.
        """
        tier = tier_for(begin_s, self._clock(), self._tiers)
        return await self._store.read(
            lambda connection: read_points(
                connection,
                series,
                resolution_s=tier.resolution_s,
                begin_s=begin_s,
                end_s=end_s,
                limit=limit,
            )
        )

    async def series(
        self, job: str, incarnation: int, *, after: tuple[str, int] | None = None, limit: int = 1000
    ) -> list[SeriesKey]:
        """Series of an incarnation ordered by name and rank, starting after `after`; those of the
        last seconds may not be written yet.

        Raises:
            StoreError: the store cannot be read.
        """
        return await self._store.read(
            lambda connection: read_series(connection, job, incarnation, after=after, limit=limit)
        )

    def start(self) -> None:
        """Start writing."""
        self._task = asyncio.create_task(self._run(), name="paramd-metric-history")

    async def stop(self) -> None:
        """Write what is buffered, then stop. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
            await self.flush()

    async def flush(self) -> None:
        """Write the buffered samples; those that cannot be written are dropped."""
        samples, self._samples = self._samples, []
        for begin in range(0, len(samples), BATCH):
            batch = samples[begin : begin + BATCH]
            try:
                await self._store.write(partial(self._insert, batch), then=self._series.update)
            except StoreError as error:
                self.dropped_count += len(samples) - begin
                log.warning("%d metric samples are lost: %s", len(samples) - begin, error)
                return

    async def sweep(self) -> None:
        """Roll up and drop what is due now. Raises StoreError."""
        ends = await self._store.read(self._ends)
        # After a restart, a tier's newest bucket tells how far it has been rolled up.
        for resolution_s, (_, newest_s) in ends.items():
            if resolution_s:
                self._rolled_s.setdefault(resolution_s, newest_s + resolution_s)
        oldest_s = {resolution_s: oldest for resolution_s, (oldest, _) in ends.items()}
        for step in plan(self._clock(), self._rolled_s, oldest_s, self._tiers):
            # One write per step, so that other writes get in between.
            await self._store.write(partial(_perform, step))
            if isinstance(step, RollUp):
                self._rolled_s[step.target_s] = step.end_s

    def _insert(self, batch: list[Sample], connection: Connection) -> dict[SeriesKey, int]:
        # On the writer thread, the only one that touches `_series`.
        if len(self._series) > MAX_SERIES_KNOWN:
            self._series.clear()
        return store_samples(connection, batch, self._series)

    def _ends(self, connection: Connection) -> dict[int, tuple[int, int]]:
        found = {tier.resolution_s: extremes(connection, tier.resolution_s) for tier in self._tiers}
        return {resolution_s: ends for resolution_s, ends in found.items() if ends is not None}

    async def _run(self) -> None:
        swept_s = time.monotonic()
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
            if time.monotonic() - swept_s >= SWEEP_S:
                swept_s = time.monotonic()
                try:
                    await self.sweep()
                except StoreError as error:
                    log.warning("metric history was not downsampled: %s", error)


def _perform(step: RollUp | Drop, connection: Connection) -> None:
    if isinstance(step, RollUp):
        roll_up(connection, step)
    else:
        drop(connection, step)
