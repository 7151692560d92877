"""A site's control plane under thousands of sidecars: its CPU, its memory, its answers.

The sidecars are simulated, the streams are real: each has a connection of its own, and
reports as often as the control plane asks of a mesh of 4,096 ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.report import Goal, Report, Table

REPORT_S = 5.0
RANKS_OF_A_WORKER = 1024
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
        process, url = stack.enter_context(_site(directory))
        token = (directory / "_site" / "token").read_text().strip()
        client = stack.enter_context(
            httpx2.Client(
                base_url=url,
                headers={"authorization": f"Bearer {token}"},
                timeout=60.0,
                trust_env=False,
            )
        )
        answer = client.post("/api/v1/jobs", json={"job": "run", "world_size": ranks})
        answer.raise_for_status()
        begin_s = time.perf_counter()
        for begin in range(0, ranks, RANKS_OF_A_WORKER):
            stack.enter_context(_worker(answer.json(), ranks, begin))
        _await_all(client, ranks)
        join_s = time.perf_counter() - begin_s
        # Joining itself is not what is measured.
        time.sleep(2 * REPORT_S if window_s > 2 * REPORT_S else 1.0)
        cpu_share = _cpu_share(process, window_s)
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


def _await_all(client: httpx2.Client, ranks: int) -> None:
    deadline_s = time.monotonic() + 60.0
    while client.get("/api/v1/jobs").json()["jobs"][0]["joined_count"] < ranks:
        if time.monotonic() > deadline_s:
            raise TimeoutError("not all simulated sidecars have joined")
        time.sleep(0.1)


def _cpu_share(process: psutil.Process, window_s: float) -> float:
    before_s, begin_s = _cpu_s(process), time.perf_counter()
    time.sleep(window_s)
    return (_cpu_s(process) - before_s) / (time.perf_counter() - begin_s)


def _gets(client: httpx2.Client, process: psutil.Process) -> tuple[list[float], float, int]:
    """Times of `GETS` requests, the control plane's CPU for one, and the answer's size."""
    path, times_s = "/api/v1/jobs/run/ranks", []
    client.get(path).raise_for_status()
    before_s = _cpu_s(process)
    for _ in range(GETS):
        begin_s = time.perf_counter()
        answer = client.get(path)
        times_s.append(time.perf_counter() - begin_s)
    return times_s, (_cpu_s(process) - before_s) / GETS, len(answer.content)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _site(directory: Path) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "paramd_service.control", "--listen", "127.0.0.1:0"]
    with (
        (directory / "control.log").open("wb") as log,
        subprocess.Popen(
            [*command, "--report-s", str(REPORT_S), "--silent-after-s", str(2.25 * REPORT_S)],
            env={**os.environ, "PARAMD_STATE_DIR": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError((directory / "control.log").read_text())
            yield psutil.Process(process.pid), json.loads(line)["url"]
        finally:
            process.kill()


@contextmanager
def _worker(registered: dict[str, Any], ranks: int, begin: int) -> Iterator[None]:
    """The process of ranks `[begin, begin + RANKS_OF_A_WORKER)`; all have joined."""
    said = {
        "address": registered["control_address"],
        "job": registered["job"],
        "epoch": registered["epoch"],
        "world_size": ranks,
        "tickets": registered["rank_tickets"],
        "report_s": REPORT_S,
    } | {key: registered[key] for key in ("layout_address", "layout_digest") if key in registered}
    end = min(begin + RANKS_OF_A_WORKER, ranks)
    command = [sys.executable, "-m", "benchmarks.workers.joins", str(begin), str(end)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(said).encode())
            process.stdin.close()
            if process.stdout.readline() != b"joined\n":
                raise RuntimeError("simulated sidecars could not join")
            yield
        finally:
            process.kill()
