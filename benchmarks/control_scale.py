"""A site's control plane under thousands of sidecars: its CPU, its memory, its answers.

The sidecars are simulated, the streams are real: each has a connection of its own, and
reports as often as the control plane asks of a mesh of 4,096 ranks.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

from benchmarks.report import Goal, Report, Table
from benchmarks.site import (
    RANKS_OF_A_WORKER,
    REPORT_S,
    await_all,
    cpu_share_of,
    cpu_used_s,
    signed_in,
    simulated,
    site,
)

GETS = 40
SIZES = (256, 1024, 4096)
QUICK_SIZES = (64, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One mesh size."""

    ranks: int
    join_s: float
    """From the first connection until all ranks were let in."""
    cpu_share: float
    """Of one core, while nobody asks."""
    rss_bytes: int
    get_p50_s: float
    get_p95_s: float
    get_cpu_s: float
    """CPU time of one answer."""
    answer_bytes: int


def run(*, quick: bool) -> Report:
    """Each size with a control plane of its own."""
    sizes, window_s = (QUICK_SIZES, 6.0) if quick else (SIZES, 30.0)
    found = [_measure(ranks, window_s) for ranks in sizes]
    largest = found[-1]
    goals = [
        Goal(what=f"CPU of one core, {largest.ranks:,} sidecars reporting every {REPORT_S:g} s",
             measured=100 * largest.cpu_share, limit=35, unit="%"),
        Goal(what=f"resident memory, {largest.ranks:,} sidecars",
             measured=largest.rss_bytes / 2**20, limit=500, unit="MiB"),
        Goal(what=f"p95 of GET ranks, {largest.ranks:,} sidecars",
             measured=1e3 * largest.get_p95_s, limit=100, unit="ms"),
    ]  # fmt: skip
    return Report(
        name="control_scale",
        tables=[_table(found)],
        goals=[] if quick else goals,
        notes=[
            "Simulated sidecars and the control plane share this machine; CPU is the control "
            "plane's own, waiting times include the others' work."
        ],
        numbers={
            str(m.ranks): {name: getattr(m, name) for name in Measured.__slots__} for m in found
        },
    )


def _table(found: list[Measured]) -> Table:
    return Table(
        title=f"Control plane, sidecars reporting every {REPORT_S:g} s",
        header=[
            "sidecars", "joined in s", "CPU of a core", "RSS MiB", "GET ranks p50 ms", "p95 ms",
            "CPU ms", "answer KiB",
        ],
        rows=[
            [
                f"{m.ranks:,}",
                f"{m.join_s:.1f}",
                f"{100 * m.cpu_share:.1f} %",
                f"{m.rss_bytes / 2**20:.0f}",
                f"{1e3 * m.get_p50_s:.1f}",
                f"{1e3 * m.get_p95_s:.1f}",
                f"{1e3 * m.get_cpu_s:.1f}",
                f"{m.answer_bytes / 2**10:.0f}",
            ]
            for m in found
        ],
    )  # fmt: skip


def _measure(ranks: int, window_s: float) -> Measured:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paramd-bench-")))
        process, url = stack.enter_context(site(directory))
        client = stack.enter_context(signed_in(directory, url))
        answer = client.post("/api/v1/jobs", json={"job": "run", "world_size": ranks})
        answer.raise_for_status()
        begin_s = time.perf_counter()
        for begin in range(0, ranks, RANKS_OF_A_WORKER):
            stack.enter_context(simulated(answer.json(), ranks, begin))
        await_all(client, ranks)
        join_s = time.perf_counter() - begin_s
        # Joining itself is not what is measured.
        time.sleep(2 * REPORT_S if window_s > 2 * REPORT_S else 1.0)
        cpu_share = cpu_share_of(process, window_s)
        gets_s, cpu_s, size = _gets(client, process)
        return Measured(
            ranks=ranks,
            join_s=join_s,
            cpu_share=cpu_share,
            rss_bytes=process.memory_info().rss,
            get_p50_s=statistics.median(gets_s),
            get_p95_s=sorted(gets_s)[int(0.95 * len(gets_s))],
            get_cpu_s=cpu_s,
            answer_bytes=size,
        )


def _gets(client: httpx2.Client, process: psutil.Process) -> tuple[list[float], float, int]:
    """Times of `GETS` requests, the control plane's CPU for one, and the answer's size."""
    path, times_s = "/api/v1/jobs/run/ranks", []
    client.get(path).raise_for_status()
    before_s = cpu_used_s(process)
    for _ in range(GETS):
        begin_s = time.perf_counter()
        answer = client.get(path)
        times_s.append(time.perf_counter() - begin_s)
    return times_s, (cpu_used_s(process) - before_s) / GETS, len(answer.content)
