"""The store: what recording a mutation takes, and what history costs the event loop.

SQLite in a directory of its own; with PARAMD_STORE_URL that database (an empty one).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Goal, Report, Table
from paramd_service.control.records.audit import Action, Audit
from paramd_service.control.store.engine import parse_store
from paramd_service.control.store.history import (
    MAX_POINTS,
    MAX_THINNED,
    MetricHistory,
    Sample,
    SeriesKey,
)
from paramd_service.control.store.store import Store

POINTS_PER_S = 1000
TICK_S = 0.005
ACTION = Action(
    actor="bench", role="admin", method="token.create", job="bench", detail={"name": "x" * 20}
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of one kind."""

    values_s: list[float]

    def at(self, share: float) -> float:
        return sorted(self.values_s)[min(int(share * len(self.values_s)), len(self.values_s) - 1)]

    def row(self, what: str) -> list[str]:
        cells = [self.at(0.5), self.at(0.99), max(self.values_s)]
        return [what, str(len(self.values_s)), *(f"{cell * 1e3:.2f}" for cell in cells)]


def run(*, quick: bool) -> Report:
    """Appends alone, loop lag without and with history, appends while history is written."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_run(Path(directory), quick=quick))


async def _run(directory: Path, *, quick: bool) -> Report:
    count, watch_s = (100, 3.0) if quick else (1000, 20.0)
    store = Store(parse_store(os.environ.get("PARAMD_STORE_URL", ""), directory=directory))
    await store.start()
    audit, history = Audit(store), MetricHistory(store)
    try:
        found = {
            "audit record": await _timed(lambda: audit.event(ACTION), count),
            "mutation (intent and outcome)": await _timed(lambda: _mutate(audit), count // 2),
            "loop lag, idle": await _lag(watch_s),
        }
        history.start()
        feeding = asyncio.create_task(_feed(history))
        await asyncio.sleep(1.0)
        begun_s, cpu_s = time.monotonic(), time.process_time()
        found[f"loop lag, {POINTS_PER_S} points/s"] = await _lag(watch_s)
        share = (time.process_time() - cpu_s) / (time.monotonic() - begun_s)
        found[f"audit record, {POINTS_PER_S} points/s"] = await _timed(
            lambda: audit.event(ACTION), count
        )
        feeding.cancel()
        await asyncio.wait({feeding})
        await history.flush()
        found["loop lag, full series are thinned"] = await _lag_of_thinning(history)
        # Else the figures are of something that failed fast.
        (last,) = await audit.page(ACTION.job, limit=1)
        assert audit.failure == ""
        assert last.seq == 2 * count + 2 * (count // 2)
    finally:
        await history.stop()
        await store.stop()
    return _report(found, share, history.dropped_count, str(store.address.url.get_backend_name()))


async def _mutate(audit: Audit) -> None:
    async with audit.mutation(ACTION):
        pass


async def _timed(call: Callable[[], Awaitable[None]], count: int) -> Spread:
    values: list[float] = []
    for _ in range(count):
        begun_s = time.perf_counter()
        await call()
        values.append(time.perf_counter() - begun_s)
    return Spread(values)


async def _lag(duration_s: float) -> Spread:
    """How much later than asked the loop comes back."""
    values: list[float] = []
    end_s = time.perf_counter() + duration_s
    while (begun_s := time.perf_counter()) < end_s:
        await asyncio.sleep(TICK_S)
        values.append(time.perf_counter() - begun_s - TICK_S)
    return Spread(values)


async def _feed(history: MetricHistory) -> None:
    """200 ranks, 5 numbers of each a second."""
    series = [
        SeriesKey(job="bench", incarnation=1, rank=rank, name=f"metric-{n}")
        for rank in range(200)
        for n in range(POINTS_PER_S // 200)
    ]
    step, portion = 0, len(series) // 10
    while True:
        for begin in range(0, len(series), portion):
            now_s = time.time()
            history.offer(
                Sample(series=key, time_s=now_s, step=step, value=float(step))
                for key in series[begin : begin + portion]
            )
            await asyncio.sleep(0.1)
        step += 1


async def _lag_of_thinning(history: MetricHistory) -> Spread:
    """As many series as are thinned in a second are full at once."""
    for second in range(MAX_POINTS + 1):
        history.offer(
            Sample(
                series=SeriesKey(job="bench", incarnation=2, rank=rank, name="x"),
                time_s=1e9 + second,
                value=1.0,
            )
            for rank in range(MAX_THINNED)
        )
        if second % 1000 == 0:
            await history.flush()
    await history.flush()
    thinning = asyncio.create_task(history.thin())
    values: list[float] = []
    while not thinning.done():
        values += (await _lag(4 * TICK_S)).values_s
    thinning.result()
    return Spread(values)


def _report(found: dict[str, Spread], share: float, dropped: int, kind: str) -> Report:
    table = Table(
        title=f"Store ({kind})",
        header=["what", "count", "p50 (ms)", "p99 (ms)", "max (ms)"],
        rows=[spread.row(what) for what, spread in found.items()],
    )
    busy = found[f"loop lag, {POINTS_PER_S} points/s"]
    goals = [
        Goal(
            what=f"event loop lag p99 at {POINTS_PER_S} points/s",
            measured=busy.at(0.99) * 1e3,
            limit=20.0,
            unit="ms",
        ),
        Goal(what="metric samples lost", measured=dropped, limit=0),
    ]
    notes = [f"CPU of the process at {POINTS_PER_S} points/s: {share:.1%} of one core."]
    numbers = {
        what: {"p50_s": s.at(0.5), "p99_s": s.at(0.99), "mean_s": statistics.fmean(s.values_s)}
        for what, s in found.items()
    }
    return Report(
        name="store", tables=[table], goals=goals, notes=notes, numbers={**numbers, "cpu": share}
    )
