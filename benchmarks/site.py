"""A site's control plane in a process of its own, and simulated sidecars that join it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil

REPORT_S = 5.0
"""What a control plane asks of a mesh of 4,096 ranks."""
RANKS_OF_A_WORKER = 1024


def await_all(client: httpx2.Client, ranks: int) -> None:
    """Returns when all ranks of the one job have joined."""
    deadline_s = time.monotonic() + 60.0
    while client.get("/api/v1/jobs").json()["jobs"][0]["joined_count"] < ranks:
        if time.monotonic() > deadline_s:
            raise TimeoutError("not all simulated sidecars have joined")
        time.sleep(0.1)


def cpu_share_of(process: psutil.Process, window_s: float) -> float:
    """Share of one core that the process takes during the next `window_s` seconds."""
    before_s, begin_s = cpu_used_s(process), time.perf_counter()
    time.sleep(window_s)
    return (cpu_used_s(process) - before_s) / (time.perf_counter() - begin_s)


def cpu_used_s(process: psutil.Process) -> float:
    """CPU time of the process so far, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def site(directory: Path, *, report_s: float = REPORT_S) -> Iterator[tuple[psutil.Process, str]]:
    """A control plane whose state lies in `directory`, and its URL."""
    command = [sys.executable, "-m", "paramd_service.control", "--listen", "127.0.0.1:0"]
    with (
        (directory / "control.log").open("wb") as log,
        subprocess.Popen(
            [*command, "--report-s", str(report_s), "--silent-after-s", str(2.25 * report_s)],
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
def signed_in(directory: Path, url: str) -> Iterator[httpx2.Client]:
    """A client of that control plane, as its admin."""
    token = (directory / "_site" / "token").read_text().strip()
    headers = {"authorization": f"Bearer {token}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False) as client:
        yield client


@contextmanager
def simulated(
    registered: dict[str, Any],
    ranks: int,
    begin: int,
    *,
    report_s: float = REPORT_S,
    worker: str = "joins",
    ranks_of_a_worker: int = RANKS_OF_A_WORKER,
) -> Iterator[int]:
    """The process (its pid) of ranks `[begin, begin + ranks_of_a_worker)`; all have joined.

    Args:
        registered: what POST /jobs answered.
        worker: which module of `benchmarks.workers` plays the sidecars.
    """
    said = {
        "address": registered["control_address"],
        "job": registered["job"],
        "incarnation": registered["incarnation"],
        "world_size": ranks,
        "tickets": registered["rank_tickets"],
        "report_s": report_s,
    } | {key: registered[key] for key in ("layout_address", "layout_digest") if key in registered}
    end = min(begin + ranks_of_a_worker, ranks)
    with told_worker(worker, str(begin), str(end), said=said, answer="joined") as pid:
        yield pid


@contextmanager
def told_worker(name: str, *arguments: str, said: Mapping[str, Any], answer: str) -> Iterator[int]:
    """A process of `benchmarks.workers` (its pid) that was told `said` and has answered."""
    command = [sys.executable, "-m", f"benchmarks.workers.{name}", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(said).encode())
            process.stdin.close()
            if process.stdout.readline() != f"{answer}\n".encode():
                raise RuntimeError(f"the worker {name} ended before it said {answer!r}")
            yield process.pid
        finally:
            process.kill()
