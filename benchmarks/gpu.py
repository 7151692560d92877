"""What arenas on a CUDA device cost a training; without a device nothing is measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Goal, Report, Table

BILLION, QUICK = ("2048", "20", "60"), ("512", "4", "5")
"""Width and layers of the transformer, and seconds of each part; the first has 1.0e9 parameters."""

RESTART, RESTART_QUICK = ("4096", "100"), ("2048", "20")
"""Width and layers of what is restarted: 20 GB and 1 GB of weights and moments."""

RESTARTS = 3
LIMIT_S = 300.0


def run(*, quick: bool) -> Report:
    """One process trains, bare and attached; another thread of it reads."""
    if not torch.cuda.is_available():
        why = f"Nothing was measured: torch {torch.__version__} finds no CUDA device here."
        return Report(name="gpu", tables=[], goals=[], notes=[why])
    found = steps(QUICK if quick else BILLION)
    found["restarts"] = restarts(RESTART_QUICK if quick else RESTART, 1 if quick else RESTARTS)
    return Report(
        name="gpu", tables=tables(found), goals=[] if quick else goals(found), numbers=found
    )


def steps(size: Sequence[str]) -> dict[str, Any]:
    """What a process says that trains bare, attached, and read."""
    command = [sys.executable, "-m", "benchmarks.workers.gpu", *size]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def restarts(size: Sequence[str], count: int) -> list[dict[str, Any]]:
    """What starts say of a training that was killed, each after another kill."""
    found = []
    for _ in range(count):
        with tempfile.TemporaryDirectory(prefix="paramd-gpu-") as name:
            found.append(_restarted(Path(name), size))
    return found


def _restarted(folder: Path, size: Sequence[str]) -> dict[str, Any]:
    (folder / "state").mkdir(mode=0o700)
    environment = os.environ | {"PARAMD_STATE_DIR": str(folder / "state"), "PARAMD_LINGER_S": "60"}
    command = [sys.executable, "-m", "benchmarks.workers.gpu_restart", str(folder), *size]
    first = subprocess.Popen([*command, "train"], env=environment, stdout=sys.stderr)
    try:
        until_s = time.monotonic() + LIMIT_S
        while not (folder / "trained").exists():
            if first.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError("the training that was to be killed did not begin")
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    subprocess.run(
        [*command, "resume"], env=environment, stdout=sys.stderr, check=True, timeout=LIMIT_S
    )
    told: dict[str, Any] = json.loads((folder / "restarted").read_text())
    if told["resumed"] != "live":
        raise RuntimeError(f"the killed training was resumed: {told['resumed']}; expected live")
    return told


def goals(found: dict[str, Any]) -> list[Goal]:
    """What was promised, for the larger of both sizes."""
    rate = found["parameter_bytes"] / found["summon_s"]
    return [
        Goal(what="a step, attached and idle", measured=found["idle_s"] / found["bare_s"],
             limit=1.002),
        Goal(what="a step, summoned every 10 s", measured=found["read_s"] / found["bare_s"],
             limit=1.01),
        Goal(what="a step, gradient statistics read all the time",
             measured=found["statistics_s"] / found["bare_s"], limit=1.01),
        Goal(what="a restart, to its first step",
             measured=statistics.median(one["until_step_s"] for one in found["restarts"]),
             limit=3.0, unit="s"),
        Goal(what="longest stall of an update", measured=1e3 * found["longest_stall_s"], limit=1.0,
             unit="ms"),
        Goal(what="summon, of the pinned rate", measured=rate / found["pinned_bytes_per_s"],
             limit=0.85, at_least=True),
    ]  # fmt: skip


def tables(found: dict[str, Any]) -> list[Table]:
    """What `steps` and `restarts` say, for people."""
    return [_table(found), _restart_table(found["restarts"])]


def _table(found: dict[str, Any]) -> Table:
    return Table(
        title=f"A transformer of {found['parameter_bytes'] / 1e9:.2f} GB on {found['device']}",
        header=[
            "step in ms: bare",
            "attached",
            "summoned",
            "gradient statistics",
            "summon in s",
            "longest stall in ms",
        ],
        rows=[
            [
                *(
                    f"{1e3 * found[name]:.3f}"
                    for name in ("bare_s", "idle_s", "read_s", "statistics_s")
                ),
                f"{found['summon_s']:.2f}",
                f"{1e3 * found['longest_stall_s']:.2f}",
            ]
        ],
    )


def _restart_table(found: Sequence[dict[str, Any]]) -> Table:
    stages = list(found[0]["stages"])
    return Table(
        title=f"A restart with {found[0]['state_bytes'] / 1e9:.1f} GB of weights and moments, in s",
        header=["first line to first step", *stages],
        rows=[
            [f"{one['until_step_s']:.2f}", *(f"{one['stages'][name]:.2f}" for name in stages)]
            for one in found
        ],
    )
