"""Every set of arguments of `summon_full_params` on FSDP1: who does what they say?"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from benchmarks.ranks import ObedientRanks
from benchmarks.report import Goal, Report, Table

WORLD_SIZE = 2
FLAGS = ("writeback", "rank0_only", "offload_to_cpu", "with_grads")
CELLS = list(itertools.product((True, False), repeat=6))
"""The flags in this order, then `use_orig_params`, then whether it shards."""


def run(*, quick: bool) -> Report:
    """All cells by both; a process that a cell ends is started again."""
    found = {by: _all_cells(by) for by in ("torch", "paramd")}
    rows = [
        [
            *("yes" if value else "no" for value in cell[:5]),
            "FULL_SHARD" if cell[5] else "NO_SHARD",
            found["torch"][cell],
            found["paramd"][cell],
        ]
        for cell in CELLS
    ]
    counts = {by: Counter(_sort(answer) for answer in found[by].values()) for by in found}
    sorts = ("ok", "wrong", "refused", "error", "crash")
    return Report(
        name="local_summon_cells",
        tables=[
            Table(
                title=f"{len(CELLS)} cells, what they do ({WORLD_SIZE} ranks, CPU)",
                header=[*FLAGS, "use_orig_params", "strategy", "PyTorch", "paramd"],
                rows=rows,
            ),
            Table(
                title="Counted",
                header=["by", *sorts],
                rows=[[by, *(str(counts[by][sort]) for sort in sorts)] for by in counts],
            ),
        ],
        goals=[
            Goal(
                what="cells of summon_full_params that do what the arguments say",
                measured=counts["paramd"]["ok"], limit=len(CELLS), at_least=True,
            )
        ],
        numbers={by: dict(counts[by]) for by in counts},
    )  # fmt: skip


def _all_cells(by: str) -> dict[tuple[bool, ...], str]:
    found: dict[tuple[bool, ...], str] = {}
    while len(found) < len(CELLS):
        left = [cell for cell in CELLS if cell not in found]
        try:
            with ObedientRanks("benchmarks.workers.local_summon_cell", WORLD_SIZE) as ranks:
                for cell in left:
                    found[cell] = "crash"
                    found[cell] = _try(ranks, by, cell)
                    if _sort(found[cell]) == "error":
                        # What it left behind must not count against the next cell.
                        break
        except (RuntimeError, OSError):
            # A rank of this cell has ended.
            continue
    return found


def _try(ranks: ObedientRanks, by: str, cell: tuple[bool, ...]) -> str:
    flags = dict(zip(FLAGS, cell[:4], strict=True))
    answers: list[Any] = ranks.call(
        "cell", by, flags, cell[4], "FULL_SHARD" if cell[5] else "NO_SHARD"
    )
    return next((str(answer) for answer in answers if answer != "ok"), "ok")


def _sort(answer: str) -> str:
    first = answer.split(":")[0]
    return first if first in ("ok", "wrong", "refused", "crash") else "error"
