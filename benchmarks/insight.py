"""What insight costs a training, and whether its checks of bits ever cry wolf.

Two ranks train under DDP with AdamW. While nobody asks and while updates are asked for, in turn:
CPU seconds of the trainers per step, their waits for copies, their step times. Then every replica's
bits are compared, and updates made again, until so many tensors were: each alarm is a false one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx2
import psutil
import torch

import paramd
from benchmarks.report import Goal, Report, Table
from paramd import places
from paramd.mesh.mesh import Mesh
from tests.launch import ROOT, Ranks, start_ranks

WORKER = ROOT / "tests" / "multiprocess" / "workers" / "insight.py"
JOB = "insight"
WORLD_SIZE = 2


def run(*, quick: bool) -> Report:
    """Three jobs, one after the other."""
    checks, block_s, blocks = (2_000, 4.0, 2) if quick else (100_000, 12.0, 6)
    asked, alone = _cost(block_s, blocks)
    spectra = _spectra(1024 if quick else 4096)
    compared, drifts = _compare(checks)
    replayed, differing = _replay(checks)
    cpu = asked.cpu_s / alone.cpu_s
    rows = [
        ["trainers' CPU per step, updates asked for / not", f"{cpu:.4f}"],
        ["step time, the same, medians", f"{asked.step_s / alone.step_s:.4f}"],
        ["updates' waits for copies, of the time", f"{100 * asked.stalled:.3f} %"],
        ["updates asked for, in steps", f"every {asked.every:.0f} of {1e3 * alone.step_s:.0f} ms"],
        *spectra,
        ["replicas' tensors compared / false alarms", f"{compared:,} / {drifts}"],
        ["tensors made again / false alarms", f"{replayed:,} / {differing}"],
    ]
    return Report(
        name="insight",
        tables=[
            Table(title="What insight costs, and its false alarms", header=["", ""], rows=rows)
        ],
        goals=[
            Goal(
                what="trainers' CPU per step while updates are asked for", measured=cpu, limit=1.01
            ),
            Goal(what="false alarms of checks of bits", measured=drifts + differing, limit=0),
        ],
        notes=["A tensor compared is one parameter, or one kind of its state, at one step."],
        numbers={"cpu": cpu, "compared": compared, "replayed": replayed},
    )


@contextmanager
def _training(*options: str, **alerts: float) -> Iterator[tuple[Mesh, Ranks, Path]]:
    with tempfile.TemporaryDirectory(prefix="paramd-bench-") as name:
        folder = Path(name)
        env = {"PARAMD_ALERTS": json.dumps({"compare": False, **alerts})}
        args = [str(folder), *options, "--quiet"]
        with start_ranks(WORKER, WORLD_SIZE, args=args, env=env, state_dir=folder / "s") as ranks:
            _wait(lambda: len(_lines(folder)) > 5)
            endpoint = places._load(folder / "s" / JOB / places.ENDPOINT_FILE)
            assert endpoint is not None
            with paramd.connect(endpoint.url, endpoint.token, job=JOB) as mesh:
                yield mesh, ranks, folder
            (folder / "end").touch()
            ranks.wait(timeout_s=120.0)


def _wait(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120.0
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the training makes no steps")
        time.sleep(0.05)


def _lines(folder: Path) -> list[str]:
    path = folder / "moments-0"
    return path.read_text().splitlines()[:-1] if path.exists() else []


class _Block:
    """CPU of the trainers, waits and steps of some blocks of time."""

    def __init__(self) -> None:
        self._cpu: list[float] = []
        self._steps: list[float] = []
        self._stalls: list[float] = []
        self._asked, self._made = 0, 0

    @contextmanager
    def measured(self, mesh: Mesh, ranks: Ranks, folder: Path) -> Iterator[None]:
        processes = [psutil.Process(rank.process.pid) for rank in ranks]
        before = [sum(one.cpu_times()[:2]) for one in processes]
        lines, stalls, begin_s = len(_lines(folder)), _stalled_s(mesh), time.monotonic()
        yield
        made = _lines(folder)[lines:]
        used = sum(sum(one.cpu_times()[:2]) for one in processes) - sum(before)
        self._cpu.append(used / len(made))
        self._made += len(made)
        self._stalls.append((_stalled_s(mesh) - stalls) / (time.monotonic() - begin_s))
        times = [json.loads(line)["time_s"] for line in made]
        self._steps += [b - a for a, b in pairwise(times)]

    def asked(self) -> None:
        self._asked += 1

    @property
    def cpu_s(self) -> float:
        return statistics.median(self._cpu)

    @property
    def step_s(self) -> float:
        return statistics.median(self._steps)

    @property
    def stalled(self) -> float:
        return statistics.fmean(self._stalls)

    @property
    def every(self) -> float:
        return self._made / max(self._asked, 1)


def _stalled_s(mesh: Mesh) -> float:
    return sum(row.stall_total_s for row in mesh.status()) / WORLD_SIZE


def _cost(block_s: float, blocks: int) -> tuple[_Block, _Block]:
    """Blocks with updates asked for every two seconds, and without, in turn."""
    asked, alone = _Block(), _Block()
    sizes = ["--width", "512", "--layers", "16", "--batch", "128", "--pause-s", "0"]
    with _training(*sizes) as (mesh, ranks, folder):
        mesh.updates()
        for _ in range(blocks):
            with alone.measured(mesh, ranks, folder):
                time.sleep(block_s)
            with asked.measured(mesh, ranks, folder):
                end_s = time.monotonic() + block_s
                while time.monotonic() < end_s:
                    next_s = time.monotonic() + 2.0
                    assert not mesh.updates().moments_missing
                    asked.asked()
                    time.sleep(max(0.0, min(next_s, end_s) - time.monotonic()))
    return asked, alone


def _spectra(width: int) -> list[list[str]]:
    """One square weight: from shards, and by torch from the whole."""
    sizes = ["--width", str(width), "--layers", "1", "--kind", "fsdp2", "--pause-s", "0.1"]
    name = "layers.0.1.weight"
    with _training(*sizes) as (mesh, _, _):
        mesh.pause()
        mesh.spectrum(name)
        begin_s = time.perf_counter()
        found = mesh.spectrum(name, timeout=300)
        took_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        (whole,) = mesh.summon(name).values()
        exact = torch.linalg.svdvals(whole)[: len(found.singular_values)]
        whole_s = time.perf_counter() - begin_s
        mesh.resume()
    apart = float((torch.tensor(found.singular_values) / exact - 1).abs().max())
    what = f"{width} x {width}, largest 8"
    return [
        [
            f"spectrum of {what}: from shards / summon and svdvals",
            f"{took_s:.1f} / {whole_s:.1f} s",
        ],
        ["the same: largest relative difference", f"{apart:.1e}"],
    ]


MANY = ["--width", "24", "--layers", "100", "--pause-s", "0"]
"""Over 400 tensors."""


def _compare(checks: int) -> tuple[int, int]:
    """Tensors compared between replicas, and alerts."""
    with _training(*MANY, compare=True, compare_steps=6) as (mesh, _, folder):
        tensors = len(mesh.params())
        # A round is a part: all parameters, or one kind of state of all.
        _until(lambda: _rounds(folder) * tensors >= checks)
        drifts = [one for one in mesh.alerts() if one.rule == "replica-drift"]
        return _rounds(folder) * tensors, len(drifts)


def _rounds(folder: Path) -> int:
    endpoint = json.loads((folder / "s" / JOB / places.ENDPOINT_FILE).read_text())
    headers = {"authorization": f"Bearer {endpoint['token']}"}
    answer = httpx2.get(f"{endpoint['url']}/metrics", headers=headers, trust_env=False)
    text = answer.raise_for_status().text
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("paramd_watch_rounds_total") and 'kind="digests",ok="true"' in line
    ]
    return int(float(line.rsplit(" ", 1)[1]))


def _until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.5)


def _replay(checks: int) -> tuple[int, int]:
    """Tensors made again by both ranks in turn, and those that differ."""
    made = differing = 0
    with _training(*MANY) as (mesh, _, _):
        while made < checks:
            for rank in range(WORLD_SIZE):
                rows = mesh.verify(rank=rank)
                made += sum(not row.refused for row in rows)
                differing += len(rows.differing)
    return made, differing
