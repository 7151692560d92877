"""Metric history: buffer samples without blocking, write them once a second, downsample."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from sqlalchemy import Connection

from paramd.clock import now_s
from paramd_service.control.store.errors import StoreError
from paramd_service.control.store.points import (
    Point,
    Sample,
    SeriesKey,
    drop,
    extremes,
    read_points,
    read_series,
    roll_up,
    store_samples,
)
from paramd_service.control.store.retention import TIERS, Drop, RollUp, Tier, plan, tier_for
from paramd_service.control.store.store import Store

FLUSH_S = 1.0
SWEEP_S = 60.0
MAX_BUFFERED = 100_000
"""Most samples waiting to be written; more are dropped and counted."""
BATCH = 2_000
"""Samples per write: small, so that an audit record queued behind it does not wait long."""
MAX_SERIES_KNOWN = 100_000

log = logging.getLogger("paramd.control.store")


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
        self, job: str, epoch: int, *, after: tuple[str, int] | None = None, limit: int = 1000
    ) -> list[SeriesKey]:
        """Series of an epoch ordered by name and rank, starting after `after`; those of the last
        seconds may not be written yet.

        Raises:
            StoreError: the store cannot be read.
        """
        return await self._store.read(
            lambda connection: read_series(connection, job, epoch, after=after, limit=limit)
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
                    log.warning("metric history was not thinned out: %s", error)


def _perform(step: RollUp | Drop, connection: Connection) -> None:
    if isinstance(step, RollUp):
        roll_up(connection, step)
    else:
        drop(connection, step)
