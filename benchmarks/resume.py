"""How soon a killed training goes on from memory, beside a checkpoint; what it costs until then."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.idle import _pairs, interval, ratio_of
from benchmarks.ranks import WORLD_SIZE, ObedientRanks, _free_port
from benchmarks.report import Goal, Report, Table

SIZES = {"10 MB": 3, "2 GiB": 683}
"""Layers of a state of that size: parameters and AdamW's two moments."""

SHARDED = (256, 8, 256)
TOLD = "paramd.attach", "torch.distributed.checkpoint"
PART = "control plane"
APART = ("import torch", "process group", PART)
"""What every restart pays for, and what is a part of another stage."""


def run(*, quick: bool) -> Report:
    """Two ranks, FSDP2 and AdamW."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name, layers in SIZES.items():
        found[name] = _restarts(layers if not quick else min(layers, 86), 2 if quick else 7)
    steps = _overhead(8.0 if quick else 90.0)
    return _report(found, steps)


def _restarts(layers: int, count: int) -> dict[str, list[dict[str, float]]]:
    """Stages of the slowest rank, of restarts both ways by turns."""
    found: dict[str, list[dict[str, float]]] = {"resume": [], "load": []}
    with tempfile.TemporaryDirectory(prefix="paramd-bench-") as directory:
        folder = Path(directory)
        processes = _start(folder, layers, "train")
        try:
            _wait(lambda: all((folder / f"trained-{r}").exists() for r in range(WORLD_SIZE)))
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
            for _ in range(count + 1):
                for how, told in found.items():
                    told.append(_restarted(folder, layers, how))
        finally:
            for process in processes:
                process.kill()
                process.wait()
            _end_helpers(folder)
    # The first of each reads what no cache has yet: interpreter, libraries.
    return {how: told[1:] for how, told in found.items()}


def _start(folder: Path, layers: int, how: str) -> list[subprocess.Popen[bytes]]:
    (folder / "state").mkdir(mode=0o700, exist_ok=True)
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(WORLD_SIZE),
        "OMP_NUM_THREADS": "1",
        "PARAMD_STATE_DIR": str(folder / "state"),
        "PARAMD_LISTEN": "127.0.0.1:0",
        "PARAMD_LINGER_S": "60",
        # As installed: compiled once, where the next start finds it.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
    }
    command = [sys.executable, "-m", "benchmarks.workers.restarting", str(folder), str(layers), how]
    return [
        subprocess.Popen(
            command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=sys.stderr
        )
        for rank in range(WORLD_SIZE)
    ]


def _restarted(folder: Path, layers: int, how: str) -> dict[str, float]:
    for process in _start(folder, layers, how):
        if process.wait(300):
            raise RuntimeError(f"a rank that was to {how} ended with code {process.returncode}")
    told = [json.loads((folder / f"told-{rank}").read_text()) for rank in range(WORLD_SIZE)]
    # The control plane is rank 0's, and all wait for it.
    return {s: max(one["stages"][s] for one in told) for s in told[0]["stages"]} | {
        PART: told[0]["of that"].get(PART, 0.0)
    }


def _wait(condition: object, limit_s: float = 300.0) -> None:
    deadline_s = time.perf_counter() + limit_s
    while not condition():  # type: ignore[operator]
        if time.perf_counter() > deadline_s:
            raise RuntimeError("the training did not begin")
        time.sleep(0.05)


def _end_helpers(folder: Path) -> None:
    """End this benchmark's sidecars and control plane, which would linger."""
    ours = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PARAMD_STATE_DIR") == str(folder / "state"):
                process.terminate()
                ours.append(process)
        except psutil.Error:
            continue
    psutil.wait_procs(ours, timeout=20)


def _overhead(seconds: float) -> dict[int, list[list[float]]]:
    """Steps of three copies of one model: attached with resume, and two that are not attached."""
    with ExitStack() as stack:
        ranks = stack.enter_context(
            ObedientRanks(
                "benchmarks.workers.training", WORLD_SIZE, environment={"PARAMD_RESUME": "auto"}
            )
        )
        for _ in range(3):
            ranks.call("build", *SHARDED, True, True)
        ranks.call("attach", 0, "bench")
        ranks.call("train", [0, 1, 2] * 3)
        return _pairs(ranks, seconds)


def _report(
    found: dict[str, dict[str, list[dict[str, float]]]], steps: dict[int, list[list[float]]]
) -> Report:
    rows, goals = [], []
    for size, by_way in found.items():
        for how, told in by_way.items():
            total = [sum(s for name, s in one.items() if name not in APART) for one in told]
            stage = next(name for name in TOLD if name in told[0])
            rows.append(
                [
                    f"{size}, {stage}",
                    _seconds(total),
                    _seconds([one[stage] for one in told]),
                    _seconds([one[PART] for one in told]) if how == "resume" else "",
                    _seconds([one["build the model"] for one in told]),
                ]
            )
            if how == "resume":
                goals.append(
                    Goal(
                        what=f"killed to first step, {size}",
                        measured=statistics.median(total),
                        limit=0.5,
                        unit="s",
                    )
                )
    attached, control = ratio_of(steps[0], steps[1]), ratio_of(steps[2], steps[1])
    goals.append(
        Goal(what="step time with resume / unattached, median", measured=attached[1], limit=1.01)
    )
    step_ms = 1e3 * statistics.median(step[0] for step in steps[1])
    return Report(
        name="resume",
        tables=[
            Table(
                title="First line to first step, less import torch and process group",
                header=[
                    "state of all ranks, way",
                    "s",
                    "of that itself",
                    "and of that the control plane's start",
                    "building the model (imports of torch)",
                ],
                rows=rows,
            ),
            Table(
                title="What it costs until then",
                header=["", ""],
                rows=[
                    ["step time, resume='auto' / unattached", interval(attached)],
                    ["the same, unattached / unattached", interval(control)],
                    ["unattached step", f"{step_ms:.1f} ms, {len(steps[1])} pairs"],
                ],
            ),
        ],
        goals=goals,
        notes=["Medians (least to most) of the slowest rank; checkpoints come from warm caches."],
        numbers={"restarts": found, "ratio": attached, "control_ratio": control},
    )


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
