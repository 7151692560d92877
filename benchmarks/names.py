"""How what paramd does grows with the number of names; one rank, tiny tensors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import Goal, Report, Table
from benchmarks.resume import _end_helpers

COUNTS = (1_000, 10_000, 50_000, 100_000)
MOST_EXPONENT = 1.1
WORST_S = 0.5
"""What takes less at the largest count has no exponent that means anything."""
PAGE_S = 1.0


def run(*, quick: bool) -> Report:
    """Everything once at each count; the exponent is between 10,000 and the largest."""
    counts = COUNTS[:2] if quick else COUNTS
    took = {count: _measured(count) for count in counts}
    few, many = counts[0 if quick else 1], counts[-1]
    rows, goals = [], []
    for what in took[many]:
        grown = took[many][what] / took[few][what]
        exponent = math.log(grown) / math.log(many / few)
        told = [f"{took[count][what]:.2f}" for count in counts]
        rows.append([what, *told, f"{exponent:.2f}"])
        if took[many][what] > WORST_S:
            goals.append(
                Goal(what=f"exponent of: {what}", measured=exponent, limit=MOST_EXPONENT, unit="")
            )
    for what in ("page", "page, by a statistic", "page, by another"):
        goals.append(Goal(what=what, measured=took[many][what], limit=PAGE_S, unit="s"))
    header = ["", *(f"{count:,} names, s" for count in counts), "exponent"]
    return Report(
        name="names", tables=[Table(title="By names", header=header, rows=rows)], goals=goals
    )


def _measured(count: int) -> dict[str, float]:
    """What a training of that many names told, and then its successor."""
    with tempfile.TemporaryDirectory(prefix="paramd-bench-") as directory:
        folder = Path(directory)
        (folder / "state").mkdir(mode=0o700)
        environment = os.environ | {
            "PARAMD_STATE_DIR": str(folder / "state"),
            "PARAMD_DESTINATIONS": json.dumps({"here": str(folder)}),
            "PARAMD_LISTEN": "127.0.0.1:0",
            "PARAMD_LINGER_S": "60",
        }
        took: dict[str, float] = {}
        try:
            for _ in range(2):
                command = [sys.executable, "-m", "benchmarks.workers.named", directory, str(count)]
                subprocess.run(command, env=environment, check=False, stdout=sys.stderr)
                took |= json.loads((folder / "told").read_text())
                (folder / "told").unlink()
        finally:
            _end_helpers(folder)
    return took
