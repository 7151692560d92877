"""What serving costs the training: sidecars, against the same server inside the trainers."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack

from benchmarks.ranks import WORLD_SIZE, ObedientRanks, reading
from benchmarks.report import Goal, Report, Table

BYTES_PER_S = 200e6
WIDTH, LAYERS, BATCH = 512, 64, 64

BESIDE, INSIDE = "sidecar processes", "the same sidecars in threads of the trainers"
_JOBS = {BESIDE: "beside", INSIDE: "inside"}


def run(*, quick: bool) -> Report:
    """Blocks of steps in shuffled order: each model, read and not read."""
    rounds, block = (2, 10) if quick else (8, 25)
    with ExitStack() as stack:
        ranks = stack.enter_context(ObedientRanks("benchmarks.workers.training", WORLD_SIZE))
        size_bytes = 0
        for _ in _JOBS:
            size_bytes = ranks.call("build", WIDTH, LAYERS, BATCH, True)[0]
        ranks.call("attach", 0, _JOBS[BESIDE])
        ranks.call("attach_inside", 1, _JOBS[INSIDE])
        ranks.call("train", [0, 1, 0, 1])
        clients = {
            name: stack.enter_context(
                ObedientRanks("benchmarks.workers.client", state_dir=ranks.state_dir)
            )
            for name in _JOBS
        }
        for name, client in clients.items():
            client.call("connect", _JOBS[name])
            client.call("warm")
        times: dict[tuple[str, bool], list[float]] = {
            (name, busy): [] for name in _JOBS for busy in (False, True)
        }
        rates: dict[str, list[float]] = {name: [] for name in _JOBS}
        shuffle = random.Random(0)
        for _ in range(rounds):
            for name, busy in shuffle.sample(sorted(times), len(times)):
                number = list(_JOBS).index(name)
                steps, rate = _block(ranks, number, block, clients[name] if busy else None)
                times[name, busy] += steps
                rates[name] += [rate] if busy else []
    return _report(size_bytes, times, rates)


def _block(
    ranks: ObedientRanks, number: int, count: int, client: ObedientRanks | None
) -> tuple[list[float], float]:
    """`count` steps of one model: the slowest rank's seconds; bytes per second read meanwhile."""
    read: dict[str, float] = {}
    with ExitStack() as stack:
        if client is not None:
            read = stack.enter_context(reading(client, transport="grpc", bytes_per_s=BYTES_PER_S))
        both = ranks.call("train", [number] * count)
    steps = [max(one[0], other[0]) for one, other in zip(*both, strict=True)]
    return steps, read.get("bytes_per_s", 0.0)


def _report(
    size_bytes: int, times: dict[tuple[str, bool], list[float]], rates: dict[str, list[float]]
) -> Report:
    inflation, rows = {}, []
    for name in _JOBS:
        alone, busy = (statistics.median(times[name, one]) for one in (False, True))
        inflation[name] = busy / alone - 1
        rate = statistics.median(rates[name])
        rows.append(
            [name, f"{1e3 * alone:.1f}", f"{1e3 * busy:.1f}", f"{100 * inflation[name]:.1f} %",
             f"{rate / 1e6:.0f}"]
        )  # fmt: skip
    title = f"Training while {BYTES_PER_S / 1e6:.0f} MB/s are read over gRPC"
    header = ["served by", "step alone ms", "step while read ms", "inflation", "MB/s read"]
    return Report(
        name="serving",
        tables=[Table(title=title, header=header, rows=rows)],
        goals=[
            Goal(what="step inflation by sidecars / by the same server inside the trainers",
                 measured=inflation[BESIDE] / inflation[INSIDE], limit=0.6)
        ],
        notes=[
            f"FSDP2 model of {size_bytes / 2**20:.0f} MiB on {WORLD_SIZE} ranks; the contender "
            "runs the sidecar's servers and its copying thread in threads of the trainers."
        ],
        numbers={
            "steps_s": {f"{n}, {'read' if b else 'alone'}": t for (n, b), t in times.items()},
            "bytes_per_s": rates,
        },
    )  # fmt: skip
