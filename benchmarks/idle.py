"""What paramd costs while nobody asks: hooks, step time, the sidecar's CPU and memory."""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.ranks import WORLD_SIZE, ObedientRanks, train_for
from benchmarks.report import Goal, Report, Table
from paramd.errors import ParamdError
from paramd.memory import handover

JOB = "bench"
SHARDED = (256, 8, 256)
"""Width, layers and batch of the FSDP2 model of the step-time ratio."""
MANY = (64, 75, 512)
"""75 layers of a norm and a linear: 300 tensors, as DDP or a single GPU has them."""


def run(*, quick: bool) -> Report:
    """Two ranks; attached and unattached copies of one model take turns, step by step."""
    pairs_s, idle_s = (8.0, 5.0) if quick else (90.0, 25.0)
    with ExitStack() as stack:
        ranks = stack.enter_context(ObedientRanks("benchmarks.workers.training", WORLD_SIZE))
        for _ in range(3):
            ranks.call("build", *SHARDED, True)
        ranks.call("build", *MANY, False)
        helpers = ranks.call("attach", 0, JOB)
        ranks.call("attach", 3, "many")
        ranks.call("train", [0, 1, 2, 3] * 3)
        sidecar = _sidecar(helpers[0], 0)
        with _Idle(sidecar) as idle:
            steps = _pairs(ranks, pairs_s)
            many = [s for rank in train_for(ranks, [3], seconds=idle_s) for s in rank]
        bare = {
            number: [s for rank in ranks.call("empty_steps", number, 2000) for s in rank]
            for number in (0, 3)
        }
        memory_bytes = private_bytes(sidecar)
        respawn_s = _respawn(ranks, stack, sidecar)
    starts_s = [_start() for _ in range(2 if quick else 5)]
    return _report(steps, many, bare, idle, memory_bytes, starts_s, respawn_s)


Steps = dict[int, list[list[float]]]
"""By copy (0 attached, 1 and 2 not): the slowest rank's seconds, and its hooks' seconds."""


def _pairs(ranks: ObedientRanks, seconds: float) -> Steps:
    shuffle = random.Random(0)
    order = [n for _ in range(20) for n in shuffle.sample(range(3), 3)]
    found: Steps = {0: [], 1: [], 2: []}
    both = train_for(ranks, order, seconds=seconds)
    for number, one, other in zip(order * (len(both[0]) // len(order)), *both, strict=True):
        found[number].append([max(a, b) for a, b in zip(one, other, strict=True)])
    return found


class _Idle:
    """CPU seconds that a process used within the block, of the seconds that passed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.cpu_s = self.seconds = 0.0

    def __enter__(self) -> _Idle:
        self._begin = (cpu_s(self._pid), time.perf_counter())
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s = cpu_s(self._pid) - self._begin[0]
        self.seconds = time.perf_counter() - self._begin[1]


def cpu_s(pid: int) -> float:
    """CPU time of the threads that live, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def private_bytes(pid: int) -> int:
    """Resident memory but arenas and snapshots, which are shared memory."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))


def _sidecar(pids: Sequence[int], rank: int) -> int:
    for pid in pids:
        if "paramd_service.sidecar" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise RuntimeError(f"rank {rank} has started no sidecar")


def _respawn(ranks: ObedientRanks, stack: ExitStack, sidecar: int) -> float:
    """Seconds from SIGKILL of a sidecar to the next right answer about its parameters."""
    client = stack.enter_context(
        ObedientRanks("benchmarks.workers.client", state_dir=ranks.state_dir)
    )
    client.call("connect", JOB)
    begin_s = time.perf_counter()
    os.kill(sidecar, signal.SIGKILL)
    client.call("read_again")
    return time.perf_counter() - begin_s


def _start() -> float:
    """Seconds from spawning a sidecar to its first connection."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paramd-bench-")))
        path = directory / "rank-0.sock"
        begin_s = time.perf_counter()
        command = [sys.executable, "-m", "paramd_service.sidecar", "--job", JOB, "--rank", "0"]
        process = subprocess.Popen(
            [*command, "--socket", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while True:
                try:
                    handover.connect(path).close()
                    return time.perf_counter() - begin_s
                except ParamdError:
                    if process.poll() is not None or time.perf_counter() - begin_s > 30:
                        raise
                    time.sleep(0.002)
        finally:
            process.terminate()
            process.wait(20)


def _report(
    steps: Steps,
    many: Sequence[Sequence[float]],
    bare: Mapping[int, Sequence[float]],
    idle: _Idle,
    memory_bytes: int,
    starts_s: Sequence[float],
    respawn_s: float,
) -> Report:
    attached, control = ratio_of(steps[0], steps[1]), ratio_of(steps[2], steps[1])
    hooks_us = 1e6 * statistics.median(step[1] for step in steps[0])
    many_us = 1e6 * statistics.median(step[1] for step in many)
    means_us = [1e6 * statistics.fmean(s[1] for s in one) for one in (steps[0], many)]
    bare_us = {number: 1e6 * statistics.median(times) for number, times in bare.items()}
    cpu = 100 * idle.cpu_s / idle.seconds
    step_ms = 1e3 * statistics.median(step[0] for step in steps[1])
    start_s = statistics.median(starts_s)
    rows = [
        [
            "hooks within training, FSDP2 model, median (mean)",
            f"{hooks_us:.1f} us ({means_us[0]:.1f} us)",
        ],
        [
            "hooks within training, 300 plain tensors, median (mean)",
            f"{many_us:.1f} us ({means_us[1]:.1f} us)",
        ],
        ["step time attached / unattached", interval(attached)],
        ["the same, unattached / unattached", interval(control)],
        ["unattached step", f"{step_ms:.1f} ms, {len(steps[1])} pairs"],
        ["sidecar's CPU", f"{cpu:.3f} % of a core over {idle.seconds:.0f} s"],
        ["sidecar's memory beside its arena", f"{memory_bytes / 2**20:.1f} MiB"],
        ["start of a sidecar", f"{start_s:.2f} s"],
        ["killed to answering again", f"{respawn_s:.2f} s"],
    ]
    rows[:0] = [
        [
            f"hooks back to back, {what}, median (least)",
            f"{bare_us[number]:.1f} us ({least:.1f} us)",
        ]
        for number, what in ((0, "FSDP2 model"), (3, "300 plain tensors"))
        for least in [1e6 * min(bare[number])]
    ]
    goals = [
        Goal(what="hooks back to back, FSDP2 model", measured=bare_us[0], limit=20, unit="us"),
        Goal(what="hooks back to back, 300 tensors", measured=bare_us[3], limit=20, unit="us"),
        Goal(what="hooks within training, FSDP2 model", measured=hooks_us, limit=40, unit="us"),
        Goal(what="hooks within training, 300 tensors", measured=many_us, limit=40, unit="us"),
        Goal(what="step time attached / unattached, median", measured=attached[1], limit=1.005),
        Goal(what="sidecar's CPU while idle", measured=cpu, limit=0.2, unit="%"),
        Goal(what="sidecar's memory beside its arena", measured=memory_bytes / 2**20, limit=64,
             unit="MiB"),
        Goal(what="sidecar killed to answering again", measured=respawn_s, limit=5, unit="s"),
    ]  # fmt: skip
    return Report(
        name="idle",
        tables=[Table(title="What it costs while nobody asks", header=["", ""], rows=rows)],
        goals=goals,
        notes=["Ratios with their 95 % confidence intervals; the pairs are interleaved."],
        numbers={
            "ratio": attached, "control_ratio": control, "starts_s": list(starts_s),
            "steps_s": {str(n): [s[0] for s in found] for n, found in steps.items()},
        },
    )  # fmt: skip


def ratio_of(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """Median of the pairs' ratios between the ends of its 95 % confidence interval."""
    ratios = sorted(a[0] / b[0] for a, b in zip(ours, theirs, strict=True))
    half = 0.98 * math.sqrt(len(ratios))
    low = max(0, math.floor(len(ratios) / 2 - half))
    high = min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half))
    return [ratios[low], statistics.median(ratios), ratios[high]]


def interval(ratio: Sequence[float]) -> str:
    return f"{ratio[1]:.4f} [{ratio[0]:.4f}, {ratio[2]:.4f}]"
