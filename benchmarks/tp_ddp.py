"""TP+DDP: what the hooks cost each forward, against PyTorch's."""

from __future__ import annotations

from benchmarks.harness import run_rounds
from benchmarks.ranks import ObedientRanks
from benchmarks.report import Goal, Report, Table

PARAMETERS = 500
WORLD_SIZE = 2


def run(*, quick: bool) -> Report:
    """One forward of a module whose forward does nothing, in shuffled turns."""
    with ObedientRanks("benchmarks.workers.tp_ddp", WORLD_SIZE) as ranks:
        ranks.call("build", PARAMETERS)
        series = run_rounds(
            {
                f"{by}, {'training' if grad else 'no_grad'}": (
                    lambda by=by, grad=grad: min(ranks.call("forward", by, grad))
                )
                for by in ("torch", "paramd")
                for grad in (True, False)
            },
            rounds=9 if quick else 51,
        )
    rows = [
        [name, f"{1e3 * found.seconds:.2f}", ", ".join(f"{1e3 * s:.2f}" for s in found.spread_s)]
        for name, found in series.items()
    ]
    return Report(
        name="tp_ddp",
        tables=[
            Table(
                title=f"Hooks of one forward, {PARAMETERS} tensor-parallel parameters",
                header=["by", "median ms", "fastest, slowest ms"],
                rows=rows,
            )
        ],
        goals=[
            Goal(
                what=f"TP+DDP hooks on {PARAMETERS} parameters against PyTorch's, {mode}",
                measured=series[f"paramd, {mode}"].seconds / series[f"torch, {mode}"].seconds,
                limit=1 / 3,
            )
            for mode in ("training", "no_grad")
        ],
        numbers={name: {"seconds": found.seconds} for name, found in series.items()},
    )
