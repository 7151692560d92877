"""What arenas on a CUDA device cost a training; without a device nothing is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from benchmarks.report import Goal, Report, Table

BILLION, QUICK = ("2048", "20", "60"), ("512", "4", "5")
"""Width and layers of the transformer, and seconds of each part; the first has 1.0e9 parameters."""


def run(*, quick: bool) -> Report:
    """One process trains, bare and attached; another thread of it reads."""
    if not torch.cuda.is_available():
        why = f"Nothing was measured: torch {torch.__version__} finds no CUDA device here."
        return Report(name="gpu", tables=[], goals=[], notes=[why])
    command = [sys.executable, "-m", "benchmarks.workers.gpu", *(QUICK if quick else BILLION)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Report(
        name="gpu",
        tables=[_table(found)],
        goals=[] if quick else _goals(found),
        notes=["Restarts, and gradient statistics in each step, are not in it."],
        numbers=found,
    )


def _goals(found: dict[str, Any]) -> list[Goal]:
    rate = found["parameter_bytes"] / found["summon_s"]
    return [
        Goal(what="a step, attached and idle", measured=found["idle_s"] / found["bare_s"],
             limit=1.002),
        Goal(what="a step, summoned every 10 s", measured=found["read_s"] / found["bare_s"],
             limit=1.01),
        Goal(what="longest stall of an update", measured=1e3 * found["longest_stall_s"], limit=1.0,
             unit="ms"),
        Goal(what="summon, of the pinned rate", measured=rate / found["pinned_bytes_per_s"],
             limit=0.85, at_least=True),
    ]  # fmt: skip


def _table(found: dict[str, Any]) -> Table:
    return Table(
        title=f"A transformer of {found['parameter_bytes'] / 1e9:.2f} GB on {found['device']}",
        header=["step in ms: bare", "attached", "summoned", "summon in s", "longest stall in ms"],
        rows=[
            [
                *(f"{1e3 * found[name]:.3f}" for name in ("bare_s", "idle_s", "read_s")),
                f"{found['summon_s']:.2f}",
                f"{1e3 * found['longest_stall_s']:.2f}",
            ]
        ],
    )
