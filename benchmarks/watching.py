"""What watching costs: `python -m benchmarks idle --watch [--minutes N]`.

One real training of two ranks has four copies of one model, which take turns step by step: one
without paramd, one attached as before watching was on by default, one whose ranks alone are looked
at, and one with default settings. What differs between two of them is what the rest costs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.idle import cpu_s, interval, private_bytes, ratio_of
from benchmarks.ranks import WORLD_SIZE, ObedientRanks
from benchmarks.report import Goal, Report, Table, goals_table

MODEL = (256, 8, 256)
"""Width, layers and batch of each copy."""
JOBS: Mapping[str, Mapping[str, bool]] = {
    "old": {"watch": False, "look": False}, "looks": {"watch": False}, "new": {},
}  # fmt: skip
"""Settings of alerts by job; copy 0 is not attached, and the jobs' follow in this order."""
TEXTS = {"old": "as before", "looks": "ranks looked at", "new": "default"}
PART_S = 30.0
"""Seconds of training between two looks at the processes."""
REST_S = 1.0
"""Between two rounds of steps, so that the processes of four jobs find a core."""
FIRST_PARTS = 4
"""Parts in which the first samples come quickly, on credit."""
BUDGET = 0.1
"""Per cent of one core of the host, and of the training's time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the run."""

    seconds: float
    control_s: Mapping[str, float]
    """CPU seconds of each job's control plane."""
    sidecars_s: Mapping[str, float]
    """CPU seconds of each job's sidecars, both together."""
    trainer_s: Mapping[str, float]
    """Seconds that the slowest rank's updates of each job spent in hooks and in waiting."""

    def control_of(self, job: str) -> float:
        return self.control_s[job]

    def sidecars_of(self, job: str) -> float:
        return self.sidecars_s[job]

    def host_of(self, job: str) -> float:
        return self.control_s[job] + self.sidecars_s[job]

    def trainer_of(self, job: str) -> float:
        return self.trainer_s[job]


def main(arguments: Sequence[str]) -> int:
    """Prints the tables; returns 0 also when goals are missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks idle --watch", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    options = parser.parse_args(arguments)
    found = run(minutes=options.minutes)
    found.save()
    print(found.markdown())
    print(goals_table([found]).markdown())
    return 0


def run(*, minutes: float) -> Report:
    """Train for so long, and compare the jobs."""
    with ObedientRanks("benchmarks.workers.training", WORLD_SIZE) as ranks:
        for _ in range(1 + len(JOBS)):
            ranks.call("build", *MODEL, True)
        helpers: dict[str, list[int]] = {}
        for number, (job, alerts) in enumerate(JOBS.items(), 1):
            told = ranks.call("attach", number, job, json.dumps(alerts))
            helpers[job] = [pid for pids in told for pid in pids]
        parts: list[Part] = []
        steps: list[list[list[float]]] = [[] for _ in range(1 + len(JOBS))]
        shuffle = random.Random(0)
        order = [n for _ in range(2) for n in shuffle.sample(range(len(steps)), len(steps))]
        for _ in range(max(FIRST_PARTS + 1, round(60 * minutes / PART_S))):
            parts.append(_part(ranks, helpers, order, steps))
        memory = {
            job: [private_bytes(pid) for pid in _sidecars(pids)] for job, pids in helpers.items()
        }
        told_now = {job: _told(ranks.state_dir, job) for job in JOBS}
    return _report(parts, steps, memory, told_now)


def _part(
    ranks: ObedientRanks,
    helpers: Mapping[str, Sequence[int]],
    order: Sequence[int],
    steps: list[list[list[float]]],
) -> Part:
    before, begin_s = _spent(helpers), time.perf_counter()
    both: list[list[list[float]]] = [[] for _ in ranks.pids]
    while time.perf_counter() < begin_s + PART_S:
        for rank, steps_of in enumerate(ranks.call("train", list(order))):
            both[rank] += steps_of
        time.sleep(REST_S)
    after, seconds = _spent(helpers), time.perf_counter() - begin_s
    hooks_s = [[0.0] * len(steps) for _ in both]
    for number, *some in zip(list(order) * (len(both[0]) // len(order)), *both, strict=True):
        steps[number].append([max(values) for values in zip(*some, strict=True)])
        for rank, (_, hook_s, _) in enumerate(some):
            hooks_s[rank][number] += hook_s
    return Part(
        seconds=seconds,
        control_s={job: after[job][0] - before[job][0] for job in helpers},
        sidecars_s={job: after[job][1] - before[job][1] for job in helpers},
        trainer_s={
            job: max(of_rank[number] for of_rank in hooks_s) for number, job in enumerate(JOBS, 1)
        },
    )


def _spent(helpers: Mapping[str, Sequence[int]]) -> dict[str, tuple[float, float]]:
    """CPU seconds of each job's control plane, and of its sidecars."""
    found = {}
    for job, pids in helpers.items():
        sidecars = _sidecars(pids)
        control_s = sum(cpu_s(pid) for pid in pids if pid not in sidecars)
        found[job] = control_s, sum(cpu_s(pid) for pid in sidecars)
    return found


def _sidecars(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if "paramd_service.sidecar" in psutil.Process(pid).cmdline()]


def _told(state_dir: Path, job: str) -> str:
    """What the job says of its watch."""
    endpoint = json.loads((state_dir / job / "endpoint.json").read_text())
    request = urllib.request.Request(
        f"{endpoint['url']}/api/v1/jobs/{job}",
        headers={"Authorization": f"Bearer {endpoint['token']}"},
    )
    with urllib.request.urlopen(request, timeout=30.0) as answer:
        line: str = json.load(answer)["verdict"]["line"]
    return line


def _report(
    parts: Sequence[Part],
    steps: Sequence[Sequence[Sequence[float]]],
    memory: Mapping[str, Sequence[int]],
    told: Mapping[str, str],
) -> Report:
    first, later = parts[:FIRST_PARTS], parts[FIRST_PARTS:]
    rows = [
        [what, *(f"{share(some, read, job):.3f} %" for some in (first, later))]
        for job, text in TEXTS.items()
        for what, read in (
            (f"control plane, {text}", Part.control_of),
            (f"two sidecars, {text}", Part.sidecars_of),
            (f"hooks and waits in the training, {text}", Part.trainer_of),
        )
    ]
    host = [
        share(some, Part.host_of, "new") - share(some, Part.host_of, "looks")
        for some in (first, later)
    ]
    training = [
        share(some, Part.trainer_of, "new") - share(some, Part.trainer_of, "looks")
        for some in (first, later)
    ]
    looks = [
        share(some, Part.host_of, "looks") - share(some, Part.host_of, "old")
        for some in (first, later)
    ]
    rows += [
        ["**values and gradients: the host's processors**", *(f"{one:.3f} %" for one in host)],
        ["**values and gradients: the training's time**", *(f"{one:.3f} %" for one in training)],
        ["looks at what ranks do: the host's processors", *(f"{one:.3f} %" for one in looks)],
    ]
    ratios = {
        "step time, default / as before": ratio_of(steps[3], steps[1]),
        "step time, default / without paramd": ratio_of(steps[3], steps[0]),
    }
    first_s, later_s = (sum(one.seconds for one in some) for some in (first, later))
    sidecar = max(share(later, Part.sidecars_of, job) / WORLD_SIZE for job in JOBS)
    memory_mib = max(memory["new"]) / 2**20
    return Report(
        name="idle_watch",
        tables=[
            Table(
                title="What watching costs, in shares of one core and of the time",
                header=["", f"first {first_s:.0f} s", f"the next {later_s:.0f} s"],
                rows=rows,
            ),
            Table(
                title="Step time, and memory",
                header=["", ""],
                rows=[
                    *([what, interval(one)] for what, one in ratios.items()),
                    *(
                        [f"a sidecar's memory beside its arena, {TEXTS[job]}", _mib(some)]
                        for job, some in memory.items()
                    ),
                ],
            ),
        ],
        goals=[
            Goal(what="values and gradients, processors of the host", measured=host[1],
                 limit=BUDGET, unit="%"),
            Goal(what="values and gradients, time of the training", measured=training[1],
                 limit=BUDGET, unit="%"),
            Goal(what="a sidecar's CPU", measured=sidecar, limit=0.2, unit="%"),
            Goal(what="a sidecar's memory beside its arena", measured=memory_mib, limit=64,
                 unit="MiB"),
        ],
        notes=[
            f"{len(steps[0])} steps of each copy, which take turns; the slowest rank counts.",
            f"The default says: {told['new']}.",
        ],
        numbers={
            "parts": [asdict(one) for one in parts], "ratios": ratios,
            "memory_bytes": {job: list(some) for job, some in memory.items()}, "told": dict(told),
        },
    )  # fmt: skip


def share(parts: Sequence[Part], spent: Callable[[Part, str], float], job: str) -> float:
    """Per cent of the time of these parts that a job has spent."""
    return 100 * sum(spent(one, job) for one in parts) / sum(one.seconds for one in parts)


def _mib(some: Sequence[int]) -> str:
    return f"{max(some) / 2**20:.1f} MiB"
