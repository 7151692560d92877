"""Gradient frames against passes in the trainer; what a capture costs; whole gradients."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.ranks import ObedientRanks
from benchmarks.report import Goal, Report, Table

WORLD_SIZE = 2
SMALL = (512, 76, 96)
"""Width, layers and batch: 20M parameters in 304 tensors."""
LARGE = (2048, 16, 128)
"""256 MiB of float32."""
LARGE_QUICK = (2048, 4, 128)

BARE, HISTC, WATCH = "nothing", "torch.histc of each gradient", "as wandb.watch does it"
STATS, HISTOGRAM = "paramd, kind=stats", "paramd, kind=histogram"
FULL_HOST, FULL_GRPC = "whole gradients, same host", "whole gradients, gRPC"
_PASSES = {BARE: "bare", HISTC: "histc", WATCH: "watch"}


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in a row with one contender."""

    steps_s: list[float]
    """Of the slower rank."""
    hooks_s: list[float]
    frames: int = 0
    offered: int = 0
    """Steps from the first frame to the last."""
    reads_s: tuple[float, ...] = ()
    """Of each frame, from captured on all ranks to whole at the reader."""
    cpu_s: float = 0.0
    """Of all processes together, each step."""


def run(*, quick: bool) -> Report:
    """Two DDP ranks of one thread each, on as many cores as there are."""
    rounds, steps = (1, 5) if quick else (8, 12)
    with ExitStack() as stack:
        small = _Job(stack, SMALL, "stats")
        contenders = (BARE, HISTC, WATCH, STATS, HISTOGRAM)
        for name in contenders:
            small.block(name, 2)
        found: dict[str, list[Block]] = {name: [] for name in contenders}
        for round_ in range(rounds):
            # Each is first as often as last.
            for name in contenders[round_ % 5 :] + contenders[: round_ % 5]:
                found[name].append(small.block(name, steps))
        both = small.ranks.call("memcpy")
        floor_s = max(one[0] for one in both), max(one[1] for one in both)
        empty_s = [s for rank in small.ranks.call("empty_hooks", 2000) for s in rank]
        small_bytes = small.size_bytes
    with ExitStack() as stack:
        large = _Job(stack, LARGE_QUICK if quick else LARGE, "full")
        senders = stack.enter_context(
            ObedientRanks("benchmarks.workers.sender", WORLD_SIZE, state_dir=large.ranks.state_dir)
        )
        large.dial(senders)
        names = (BARE, FULL_HOST, FULL_GRPC)
        whole: dict[str, list[Block]] = {name: [] for name in names}
        raw_s: list[float] = []
        for _ in range(max(2, rounds // 2)):
            for name in names:
                whole[name].append(large.block(name, max(4, steps // 2)))
            raw_s.append(large.raw(senders))
        large_bytes = large.size_bytes
    return _report(found, whole, raw_s, floor_s, empty_s, (small_bytes, large_bytes))


class _Job:
    """Two ranks that train, attached, and one reader."""

    def __init__(self, stack: ExitStack, shape: tuple[int, int, int], kind: str) -> None:
        self.ranks = stack.enter_context(ObedientRanks("benchmarks.workers.gradients", WORLD_SIZE))
        self.reader = stack.enter_context(
            ObedientRanks("benchmarks.workers.gradient_reader", state_dir=self.ranks.state_dir)
        )
        self.size_bytes = int(self.ranks.call("build", *shape)[0])
        helpers = [pid for pids in self.ranks.call("attach") for pid in pids]
        self._watched = [*self.ranks.pids, *self.reader.pids, *helpers]
        self.reader.call("connect")
        # Sidecars load torch, memory becomes warm.
        self._with_reader(kind, "auto", 3)

    def block(self, name: str, count: int) -> Block:
        """`count` steps with a contender."""
        before_s = self._cpu_s()
        if name in _PASSES:
            steps = self._steps(_PASSES[name], count)
            cpu_s = (self._cpu_s() - before_s) / len(steps)
            return Block([s[1] for s in steps], [s[2] for s in steps], cpu_s=cpu_s)
        kind = {STATS: "stats", HISTOGRAM: "histogram"}.get(name, "full")
        transport = "grpc" if name == FULL_GRPC else "auto"
        steps, frames = self._with_reader(kind, transport, count)
        cpu_s = (self._cpu_s() - before_s) / len(steps)
        first, last = frames[0][0], frames[-1][0]
        # Only steps between two frames: before and after nobody asked for anything.
        within = [s for s in steps if first <= s[0] <= last]
        return Block(
            [s[1] for s in within],
            [s[2] for s in within],
            len(frames),
            int(last - first) + 1,
            tuple(frame[2] for frame in frames[1:]),
            cpu_s,
        )

    def _cpu_s(self) -> float:
        found = 0.0
        for pid in self._watched:
            times = psutil.Process(pid).cpu_times()
            found += times.user + times.system
        return found

    def dial(self, senders: ObedientRanks) -> None:
        """Connects the reader to the raw senders."""
        ports = senders.call("port")
        senders.tell("accept")
        self.reader.call("dial", ports)
        senders.hear()

    def raw(self, senders: ObedientRanks) -> float:
        """Seconds that raw sockets need for the gradients' bytes while the ranks train."""
        part_bytes = self.size_bytes // WORLD_SIZE
        senders.tell("send", part_bytes)
        self.reader.tell("receive", part_bytes)
        _, found = self._until_heard()
        senders.hear()
        return float(found)

    def _with_reader(
        self, kind: str, transport: str, count: int
    ) -> tuple[list[list[float]], list[list[float]]]:
        self.reader.tell("frames", kind, transport, count, 0.0)
        return self._until_heard()

    def _until_heard(self) -> tuple[list[list[float]], Any]:
        """Trains until the reader answers; the steps, and its answer."""
        answers: list[Any] = []
        hearing = threading.Thread(target=lambda: answers.extend(self.reader.hear()))
        hearing.start()
        steps = []
        while hearing.is_alive():
            steps += self._steps("bare", 2)
        hearing.join()
        return steps, answers[0]

    def _steps(self, kind: str, count: int) -> list[list[float]]:
        both = self.ranks.call("train", kind, count)
        return [[a[0], max(a[1], b[1]), max(a[2], b[2])] for a, b in zip(*both, strict=True)]


def _median(blocks: Sequence[Block]) -> float:
    return statistics.median(s for block in blocks for s in block.steps_s)


def _cpu(blocks: Sequence[Block]) -> float:
    return statistics.median(block.cpu_s for block in blocks)


def _report(
    found: Mapping[str, Sequence[Block]],
    whole: Mapping[str, Sequence[Block]],
    raw_s: Sequence[float],
    floor_s: tuple[float, float],
    empty_s: Sequence[float],
    sizes: tuple[int, int],
) -> Report:
    small_bytes, large_bytes = sizes
    memcpy_s, scan_s = floor_s
    bare_s, large_bare_s = _median(found[BARE]), _median(whole[BARE])
    bare_cpu_s, large_cpu_s = _cpu(found[BARE]), _cpu(whole[BARE])
    extra = {name: _median(blocks) - bare_s for name, blocks in found.items()}
    rows = [
        [
            name,
            f"{1e3 * _median(blocks):.1f}",
            f"{_median(blocks) / bare_s:.3f}",
            f"{1e3 * _cpu(blocks):.0f}",
            f"{1e3 * (_cpu(blocks) - bare_cpu_s):+.0f}",
            _share(blocks),
        ]
        for name, blocks in found.items()
    ]
    added = {name: _cpu(blocks) - bare_cpu_s for name, blocks in found.items()}
    # Replicas share the work: each rank captures half of what DDP has on both.
    hook_s = statistics.median(s for block in found[STATS] for s in block.hooks_s)
    copies = hook_s / (memcpy_s / WORLD_SIZE)
    raw = statistics.median(raw_s)
    full_rows = []
    for name in (FULL_HOST, FULL_GRPC):
        read_s = statistics.median(s for block in whole[name] for s in block.reads_s)
        step_s = _median(whole[name])
        full_rows.append(
            [
                name,
                f"{1e3 * step_s:.1f}",
                f"{step_s / large_bare_s:.3f}",
                f"{(step_s - large_bare_s) / (large_bytes / 2**30):.2f}",
                f"{(_cpu(whole[name]) - large_cpu_s) / (large_bytes / 2**30):.2f}",
                _share(whole[name]),
                f"{large_bytes / read_s / 1e9:.2f}",
                f"{raw / read_s:.2f}",
            ]
        )
    best = max(
        raw / statistics.median(s for block in whole[name] for s in block.reads_s)
        for name in (FULL_HOST, FULL_GRPC)
    )
    empty_us = 1e6 * statistics.median(empty_s)
    return Report(
        name="gradients",
        tables=[
            Table(
                title=f"Statistics each step, {small_bytes / 4e6:.0f}M parameters, DDP x2",
                header=[
                    "contender", "step, ms", "ratio", "CPU ms a step", "added", "frames of steps",
                ],
                rows=rows,
            ),
            Table(
                title=f"Whole gradients each step, {large_bytes / 2**20:.0f} MiB, DDP x2",
                header=[
                    "contender", "step, ms", "ratio", "s of step per GiB", "CPU s per GiB",
                    "frames of steps", "GB/s read", "share of a raw socket",
                ],
                rows=full_rows,
            ),
        ],
        goals=[
            Goal(what="statistics: added CPU / that of wandb.watch's pass",
                 measured=added[STATS] / added[WATCH], limit=0.1),
            Goal(what="statistics: added CPU / that of torch.histc's pass",
                 measured=added[STATS] / added[HISTC], limit=0.1),
            Goal(what="histogram: added CPU / that of wandb.watch's pass",
                 measured=added[HISTOGRAM] / added[WATCH], limit=0.1),
            Goal(what="statistics: step time ratio", measured=_median(found[STATS]) / bare_s,
                 limit=1 + 0.1 * extra[WATCH] / bare_s),
            Goal(what="capture in memcpys of what is captured", measured=copies, limit=1.5),
            Goal(what="pre-hook without a reader", measured=empty_us, limit=10, unit="us"),
            Goal(what="whole gradients: share of a raw socket", measured=best, limit=0.42,
                 at_least=True),
            Goal(what="whole gradients, gRPC: step time ratio",
                 measured=_median(whole[FULL_GRPC]) / large_bare_s, limit=1.10),
        ],
        notes=[
            f"Bare steps take {1e3 * bare_s:.0f} ms (small) and {1e3 * large_bare_s:.0f} ms "
            "(large); trainers, sidecars and the reader share the cores, so whatever a sidecar "
            "computes is taken from training here. Passes of W&B's kind run on rank 0 alone, as "
            "it does. Raw sockets are measured while the ranks train. Where cores are busy the "
            "added CPU is what training loses, and it is the steadier figure.",
            f"The floor: to copy all gradients once takes {1e3 * memcpy_s:.1f} ms of CPU, to read "
            f"the copy once {1e3 * scan_s:.1f} ms; together {sum(floor_s) / added[WATCH]:.3f} of "
            "what wandb.watch's pass takes.",
        ],
        numbers={
            "extra_s": extra, "added_cpu_s": added,
            "memcpy_s": memcpy_s, "floor_read_s": scan_s, "hook_s": hook_s, "raw_s": list(raw_s),
            "steps_s": {n: [b.steps_s for b in blocks] for n, blocks in found.items()},
            "whole_steps_s": {n: [b.steps_s for b in blocks] for n, blocks in whole.items()},
        },
    )  # fmt: skip


def _share(blocks: Sequence[Block]) -> str:
    frames, offered = sum(b.frames for b in blocks), sum(b.offered for b in blocks)
    return f"{frames} of {offered}" if offered else ""
