"""How long a trainer waits for snapshots, against what DCP's asynchronous save blocks."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.ranks import WORLD_SIZE, ObedientRanks, reading, train_for
from benchmarks.report import Goal, Report, Table
from benchmarks.workers.saving import KINDS

JOB = "bench"
WIDTH, LAYERS, BATCH = 1024, 16, 64

_SAVES = {
    "plain": "DCP async_save, thread",
    "cached": "the same, staging memory shared and kept",
    "background": "the same, staged by a thread: call, and wait at the next update",
}


def run(*, quick: bool) -> Report:
    """Two ranks train while a client reads all parameters as fast as it can."""
    read_s, alone_s = (10.0, 2.0) if quick else (90.0, 10.0)
    with ExitStack() as stack:
        ranks = stack.enter_context(ObedientRanks("benchmarks.workers.training", WORLD_SIZE))
        size_bytes = ranks.call("build", WIDTH, LAYERS, BATCH, True)[0]
        # A second model for the saves and for steps that nobody reads.
        ranks.call("build", WIDTH, LAYERS, BATCH, True)
        ranks.call("attach", 0, JOB)
        client = stack.enter_context(
            ObedientRanks("benchmarks.workers.client", state_dir=ranks.state_dir)
        )
        ranks.call("train", [0, 1, 0])
        client.call("connect", JOB)
        client.call("warm")
        alone = _train(ranks, alone_s)
        with reading(client, transport="same-host") as read:
            read_steps = _train(ranks, read_s)
        saves = {kind: _saves(ranks, kind, 3 if quick else 9) for kind in KINDS}
    return _report(size_bytes, alone, read_steps, read["count"], saves)


def _train(ranks: ObedientRanks, seconds: float) -> list[list[float]]:
    """Steps of all ranks: seconds, seconds in hooks, seconds of waiting for copies."""
    return [step for rank in train_for(ranks, [0] * 5, seconds=seconds) for step in rank]


def _saves(ranks: ObedientRanks, kind: str, count: int) -> list[float]:
    """Seconds that the slowest rank stood still, of each save but the first two."""
    with tempfile.TemporaryDirectory(prefix="paramd-bench-", dir="/dev/shm") as directory:
        found = [max(ranks.call("save", 1, kind, f"{directory}/{n}")) for n in range(count + 2)]
    return found[2:]


def _report(
    size_bytes: int,
    alone: Sequence[Sequence[float]],
    read: Sequence[Sequence[float]],
    read_count: float,
    saves: dict[str, list[float]],
) -> Report:
    stalls_s = [step[2] for step in read]
    p99_s = _quantile(stalls_s, 0.99)
    rows = [
        _row("update's wait for copies", stalls_s),
        _row("paramd's hooks as a whole, while read", [step[1] for step in read]),
        _row("paramd's hooks as a whole, not read", [step[1] for step in alone]),
        *(_row(_SAVES[kind], times) for kind, times in saves.items()),
    ]
    step_s = statistics.median(step[0] for step in alone)
    read_step_s = statistics.median(step[0] for step in read)
    title = f"Trainer's wait, {size_bytes / 2**20:.0f} MiB on {WORLD_SIZE} ranks"
    plain = statistics.median(saves["plain"])
    best = min(statistics.median(times) for times in saves.values())
    typical_s = _quantile(stalls_s, 0.5)
    return Report(
        name="wait",
        tables=[Table(title=title, header=["", "p50 ms", "p99 ms", "max ms", "n"], rows=rows)],
        goals=[
            Goal(what="trainer's wait for a snapshot, p99", measured=1e3 * p99_s, limit=1,
                 unit="ms"),
            Goal(what="p99 wait / what DCP async_save blocks", measured=p99_s / plain,
                 limit=1 / 50),
            Goal(what="p99 wait / what its best staging blocks", measured=p99_s / best,
                 limit=1 / 10),
        ],
        notes=[
            f"{len(read)} steps of {1e3 * read_step_s:.0f} ms (not read: {1e3 * step_s:.0f} ms), "
            f"{read_count:.0f} reads of all parameters meanwhile; quantiles are over all steps "
            "of all ranks."
        ],
        numbers={"stalls_s": stalls_s, "typical_s": typical_s, "saves_s": saves,
                 "step_s": step_s, "read_step_s": read_step_s, "reads": read_count},
    )  # fmt: skip


def _row(name: str, seconds: Sequence[float]) -> list[str]:
    times = [f"{1e3 * _quantile(seconds, part):.3f}" for part in (0.5, 0.99, 1.0)]
    return [name, *times, str(len(seconds))]


def _quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
