"""How long hundreds of ranks take to meet, and how many connections each makes for it.

The ranks are light processes on this machine, their sidecars are simulated; the meeting, rank 0's
control plane and the streams that join it are real. `workers/meeting.py` says what is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.report import Goal, Report, Table

SIZES, QUICK_SIZES = (16, 64, 256), (16, 32)


def run(*, quick: bool) -> Report:
    """Each size with processes and a control plane of its own."""
    found = {ranks: measured(ranks) for ranks in (QUICK_SIZES if quick else SIZES)}
    most = max(found)
    whole_s = found[most]["attached_s"] + found[most]["joined_s"]
    goals = [
        Goal(what=f"{most} simulated ranks, met and joined", measured=whole_s, limit=10, unit="s"),
        Goal(what="connections of a rank other than the first, of as many ranks",
             measured=found[most]["connections_of_others"], limit=16),
    ]  # fmt: skip
    return Report(
        name="meeting",
        tables=[_table(found)],
        goals=[] if quick else goals,
        notes=["All ranks share this machine; what each does alone is left out."],
        numbers={str(ranks): one for ranks, one in found.items()},
    )


def measured(ranks: int) -> dict[str, Any]:
    """What `workers/meeting.py` says of that many ranks."""
    command = [sys.executable, "-m", "benchmarks.workers.meeting", str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _table(found: dict[int, dict[str, Any]]) -> Table:
    return Table(
        title="Simulated ranks that meet",
        header=["ranks", "met in s", "sidecars joined after s", "connections: rank 0", "others"],
        rows=[
            [
                str(ranks),
                f"{one['attached_s']:.1f}",
                f"{one['joined_s']:.1f}",
                str(one["connections_of_rank_0"]),
                str(one["connections_of_others"]),
            ]
            for ranks, one in found.items()
        ],
    )
