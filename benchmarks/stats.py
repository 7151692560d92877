"""Statistics of a whole model, computed where it lies, against one pass of torch."""

from __future__ import annotations

from benchmarks.big import WORLD_SIZE, big
from benchmarks.harness import run_rounds
from benchmarks.report import Goal, Report, Table

FRESH = "stats of a new snapshot"
SHARED = "stats of a snapshot taken before"
NORM = "one torch pass: vector_norm"
SUM = "one torch pass: sum"


def run(*, quick: bool) -> Report:
    """1 GiB of float32 over two ranks; torch gets as many threads as there are sidecars."""
    with big(layers=4 if quick else 16) as job:

        def prepare(name: str) -> None:
            job.advance()
            if name == SHARED:
                job.ask("view")

        found = run_rounds(
            {
                FRESH: lambda: job.ask("stats"),
                SHARED: lambda: job.ask("stats"),
                NORM: lambda: job.ask("torch_pass", "norm", WORLD_SIZE),
                SUM: lambda: job.ask("torch_pass", "sum", WORLD_SIZE),
            },
            rounds=3 if quick else 9,
            watched=job.watched,
            before=prepare,
        )
        rows = [
            [
                name,
                f"{series.seconds:.3f}",
                f"{job.size_bytes / 1e9 / series.seconds:.2f}",
                f"{found[NORM].seconds / series.seconds:.2f}",
                f"{series.cpu_s / job.gib:.2f}",
                f"{series.page_faults:,.0f}",
            ]
            for name, series in found.items()
        ]
        gib = job.gib
    header = [
        f"{gib:g} GiB, {WORLD_SIZE} ranks", "s", "GB/s", "speed / vector_norm", "CPU s per GiB",
        "page faults",
    ]  # fmt: skip
    return Report(
        name="stats",
        tables=[Table(title="Statistics of a whole model", header=header, rows=rows)],
        goals=[
            Goal(
                what=f"{name}: speed / one torch pass (vector_norm, {WORLD_SIZE} threads)",
                measured=found[NORM].seconds / found[name].seconds, limit=0.6, at_least=True,
            )
            for name in (FRESH, SHARED)
        ],
        numbers={"seconds": {n: [x.seconds for x in s.samples] for n, s in found.items()}},
    )  # fmt: skip
