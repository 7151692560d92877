"""Metric history: buffer samples without blocking, write them once a second, thin full series.

A series has at most `MAX_POINTS` points. Each new sample is merged into the last point or begins
the next one, by the span of the series. A full series has its span doubled and its points merged
(`thinning.py`), so it always covers all of its time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import xxhash
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from paramd.clock import now_s
from paramd_service.aio import stopped
from paramd_service.control.store.engine import StoreError
from paramd_service.control.store.schema import MAX_NAME_CHARS, metric_points, metric_series
from paramd_service.control.store.store import Store
from paramd_service.control.store.thinning import Point, merge, sampled, thin

MAX_POINTS = 2_048
"""Points of a series; a separate write thins a series soon after it has more."""
KEEP_S = 30 * 86_400
"""A series is dropped this long after its last sample."""
LATEST_S = 1e11
"""Later than any sample, in seconds since the Unix epoch."""

FLUSH_S = 1.0
SWEEP_S = 60.0
MAX_SWEPT = 50
"""Most series dropped in one write."""
MAX_BUFFERED = 100_000
"""Most samples waiting to be written; more are dropped and counted."""
BATCH = 2_000
"""Samples per write: small, so that an audit record queued behind it does not wait long."""
MAX_SERIES_KNOWN = 100_000
MAX_THINNED = 8
"""Most series thinned per second: those of many ranks fill up at the same time."""

_P = metric_points.c
_S = metric_series.c
_MS = 1000

_SERIES, *_FIELDS = (column.name for column in _P)
"""All columns but the first have the names of `Point`'s fields."""
_values = attrgetter(*_FIELDS)

log = logging.getLogger("paramd.control.store")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesKey:
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


def series_of(job: str, incarnation: int, name: str, subject: str) -> SeriesKey:
    """History of a metric of one subject: ranks by number, tensors as part of the name."""
    if subject.isdecimal() and name != "norm":
        return SeriesKey(job=job, incarnation=incarnation, rank=int(subject), name=name)
    return SeriesKey(job=job, incarnation=incarnation, name=series_name(name, subject))


def subject_of(series: SeriesKey) -> tuple[str, str]:
    """(name, subject) of a series, inverse of `series_of`. A truncated subject stays truncated
    and still names the same series."""
    if series.rank >= 0:
        return series.name, str(series.rank)
    name, _, subject = series.name.partition(":")
    return name, subject


def series_name(name: str, subject: str) -> str:
    """E.g. "norm:layers.0.weight"; a long subject is truncated and ends in a digest of it."""
    whole = f"{name}:{subject}"
    if len(whole) <= MAX_NAME_CHARS:
        return whole
    digest = xxhash.xxh3_64_hexdigest(subject.encode())
    return f"{whole[: MAX_NAME_CHARS - 17]}~{digest}"


def store_samples(
    connection: Connection, samples: Iterable[Sample], known: Mapping[SeriesKey, int]
) -> tuple[dict[SeriesKey, int], list[int]]:
    """Add samples to their series; return ids of those missing from `known`, and ids of those that
    are full now. `known`: ids from earlier, committed calls; may be empty. A sample that is no
    newer than its series' newest is ignored: sidecars report again to a restarted control plane."""
    learned: dict[SeriesKey, int] = {}
    given: dict[int, list[Point]] = {}
    rows: list[dict[str, object]] = []
    states: list[dict[str, int]] = []
    for sample in samples:
        key = sample.series
        if key not in known and key not in learned:
            learned[key] = _series_id(connection, key)
        of = known[key] if key in known else learned[key]
        point = sampled(round(sample.time_s * _MS), sample.step, sample.value)
        given.setdefault(of, []).append(point)
    full: list[int] = []
    for row in connection.execute(_with_last_point(given)).all():
        last = [] if row.time_ms is None else [_point(row)]
        new = _newer(given[row.id], row.newest_ms)
        points = merge([*last, *new], row.grid_ms)
        count = row.point_count + len(points) - len(last)
        if new:
            rows += [_row(row.id, point) for point in points]
            states.append({"of": row.id, "newest_ms": new[-1].time_ms, "point_count": count})
        if count > MAX_POINTS:
            full.append(row.id)
    if states:
        _put(connection, rows)
        connection.execute(update(metric_series).where(_S.id == bindparam("of")), states)
    return learned, full


def thin_series(of: int, connection: Connection) -> None:
    """Merge the points of a full series, so that each covers twice the time, or more if needed."""
    grid_ms = connection.execute(select(_S.grid_ms).where(_S.id == of)).scalar()
    if grid_ms is None:
        return  # dropped meanwhile
    mine = _P.series_id == of
    rows = connection.execute(select(metric_points).where(mine).order_by(_P.time_ms))
    points, grid_ms = thin([_point(row) for row in rows], grid_ms, MAX_POINTS)
    connection.execute(delete(metric_points).where(mine))
    _put(connection, [_row(of, point) for point in points])
    state = {"grid_ms": grid_ms, "point_count": len(points)}
    connection.execute(update(metric_series).where(_S.id == of).values(state))


def _series_id(connection: Connection, key: SeriesKey) -> int:
    """The id of a series, which is created if it is new."""
    values = {"job": key.job, "incarnation": key.incarnation, "rank": key.rank, "name": key.name}
    connection.execute(_insert(connection, metric_series).values(values).on_conflict_do_nothing())
    found: int = connection.execute(select(_S.id).where(_is_series(key))).scalar_one()
    return found


def _with_last_point(ids: Iterable[int]) -> Select[Any]:
    """Series, each with the point that contains its newest sample; null where there is none."""
    here = and_(_P.series_id == _S.id, _P.time_ms == _S.newest_ms - _S.newest_ms % _S.grid_ms)
    return (
        select(_S.id, _S.grid_ms, _S.newest_ms, _S.point_count, metric_points)
        .outerjoin(metric_points, here)
        .where(_S.id.in_(ids))
    )


def _newer(points: list[Point], newest_ms: int) -> list[Point]:
    """The points after `newest_ms`, in order, the first of each millisecond."""
    found = {point.time_ms: point for point in reversed(points) if point.time_ms > newest_ms}
    return [found[time_ms] for time_ms in sorted(found)]


def _is_series(key: SeriesKey) -> ColumnElement[bool]:
    mesh = _S.job == key.job, _S.incarnation == key.incarnation
    return and_(*mesh, _S.rank == key.rank, _S.name == key.name)


def _insert(connection: Connection, table: Table) -> Any:
    """INSERT with ON CONFLICT: both dialects support it, SQLAlchemy's generic insert does not."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def _put(connection: Connection, rows: list[dict[str, object]]) -> None:
    """Insert points, or replace those that begin at the same times."""
    adding = _insert(connection, metric_points)
    replaced = {name: adding.excluded[name] for name in _FIELDS}
    connection.execute(
        adding.on_conflict_do_update(index_elements=[_P.series_id, _P.time_ms], set_=replaced), rows
    )


def _row(of: int, point: Point) -> dict[str, object]:
    return {_SERIES: of, **dict(zip(_FIELDS, _values(point), strict=True))}


def _point(row: Row[Any]) -> Point:
    """The point of a row that ends in the columns of `metric_points`."""
    return Point(**dict(zip(_FIELDS, row[-len(_FIELDS) :], strict=True)))


class MetricHistory:
    """Buffers and reads series. Single event loop; `start` to `stop` lie within the store's."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = now_s) -> None:
        self._store = store
        self._clock = clock
        self._samples: list[Sample] = []
        self._series: dict[SeriesKey, int] = {}
        self._full: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self.problem = ""
        """Why the last write failed; empty if it did not."""
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
        self,
        series: SeriesKey,
        *,
        begin_s: float = 0.0,
        end_s: float = LATEST_S,
        limit: int = MAX_POINTS,
    ) -> list[Point]:
        """Points of one series that are at least partly within `[begin_s, end_s)`, merged until
        they are at most `limit`. Raises StoreError."""
        chosen = (
            select(_S.grid_ms, metric_points)
            .join(metric_series, _S.id == _P.series_id)
            .where(
                _is_series(series),
                _P.time_ms + _P.span_ms > math.ceil(begin_s * _MS),
                _P.time_ms < math.ceil(end_s * _MS),
            )
            .order_by(_P.time_ms)
        )

        def work(connection: Connection) -> list[Point]:
            rows = connection.execute(chosen).all()
            grid_ms = rows[0].grid_ms if rows else 1
            return list(thin([_point(row) for row in rows], grid_ms, limit)[0])

        return await self._store.read(work)

    async def series(
        self, job: str, incarnation: int, *, after: tuple[str, int] | None = None, limit: int = 1000
    ) -> list[SeriesKey]:
        """Series of an incarnation ordered by name and rank, starting after `after`; those of the
        last seconds may not be written yet. Raises StoreError."""
        chosen = (
            select(_S.name, _S.rank)
            .where(_S.job == job, _S.incarnation == incarnation)
            .order_by(_S.name, _S.rank)
            .limit(limit)
        )
        if after is not None:
            name, rank = after
            chosen = chosen.where(or_(_S.name > name, and_(_S.name == name, _S.rank > rank)))
        rows = await self._store.all(chosen)
        return [
            SeriesKey(job=job, incarnation=incarnation, rank=row.rank, name=row.name)
            for row in rows
        ]

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="paramd-metric-history")

    async def stop(self) -> None:
        """Write the buffered samples, then stop. Idempotent."""
        if self._task is not None:
            await stopped(self._task)
            self._task = None
            await self.flush()

    async def flush(self) -> None:
        """Write the buffered samples; those that cannot be written are dropped."""
        samples, self._samples = self._samples, []
        for begin in range(0, len(samples), BATCH):
            batch = samples[begin : begin + BATCH]
            try:
                _, full = await self._store.write(
                    partial(self._insert, batch), then=lambda found: self._series.update(found[0])
                )
            except StoreError as error:
                self.dropped_count += len(samples) - begin
                self.problem = str(error)
                log.warning("%d metric samples are lost: %s", len(samples) - begin, error)
                return
            self.problem = ""
            self._full.update(full)

    async def thin(self) -> None:
        """Thin some of the series that are full. Raises StoreError."""
        for of in list(self._full)[:MAX_THINNED]:
            # One write per series, so that other writes get in between.
            await self._store.write(partial(thin_series, of))
            self._full.discard(of)

    async def sweep(self) -> None:
        """Drop series that are too old, some at a time. Raises StoreError."""
        before_ms = (self._clock() - KEEP_S) * _MS
        old = select(_S.id).where(_S.newest_ms < before_ms).limit(MAX_SWEPT)
        dropping = delete(metric_series).where(_S.id.in_(old))
        while await self._store.write(lambda connection: connection.execute(dropping).rowcount):
            # On the writer thread, like all uses of `_series`: an id of a dropped series is stale.
            await self._store.write(lambda _: self._series.clear())

    def _insert(
        self, batch: list[Sample], connection: Connection
    ) -> tuple[dict[SeriesKey, int], list[int]]:
        # On the writer thread, the only one that touches `_series`.
        if len(self._series) > MAX_SERIES_KNOWN:
            self._series.clear()
        return store_samples(connection, batch, self._series)

    async def _run(self) -> None:
        swept_s = time.monotonic()
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
            try:
                await self.thin()
                if time.monotonic() - swept_s >= SWEEP_S:
                    swept_s = time.monotonic()
                    await self.sweep()
            except StoreError as error:
                log.warning("metric history was not thinned: %s", error)
