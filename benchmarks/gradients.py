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
    return _report(
        _Measured(
            small=found,
            large=whole,
            raw_s=raw_s,
            memcpy_s=floor_s[0],
            scan_s=floor_s[1],
            empty_s=empty_s,
            small_bytes=small_bytes,
            large_bytes=large_bytes,
        )
    )


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
        senders.update()

    def raw(self, senders: ObedientRanks) -> float:
        """Seconds that raw sockets need for the gradients' bytes while the ranks train."""
        part_bytes = self.size_bytes // WORLD_SIZE
        senders.tell("send", part_bytes)
        self.reader.tell("receive", part_bytes)
        _, found = self._until_heard()
        senders.update()
        return float(found)

    def _with_reader(
        self, kind: str, transport: str, count: int
    ) -> tuple[list[list[float]], list[list[float]]]:
        self.reader.tell("frames", kind, transport, count, 0.0)
        return self._until_heard()

    def _until_heard(self) -> tuple[list[list[float]], Any]:
        """Trains until the reader answers; the steps, and its answer."""
        answers: list[Any] = []
        hearing = threading.Thread(target=lambda: answers.extend(self.reader.update()))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """All that was measured."""

    small: Mapping[str, Sequence[Block]]
    large: Mapping[str, Sequence[Block]]
    raw_s: Sequence[float]
    """Raw sockets, the large model's bytes."""
    memcpy_s: float
    scan_s: float
    """To copy the small model's gradients once, to read the copy once."""
    empty_s: Sequence[float]
    small_bytes: int
    large_bytes: int

    def added_cpu_s(self, name: str) -> float:
        """CPU that a contender adds to a step of the small model."""
        return _cpu(self.small[name]) - _cpu(self.small[BARE])

    def added_s(self, name: str) -> float:
        return _median(self.small[name]) - _median(self.small[BARE])

    def read_s(self, name: str) -> float:
        return statistics.median(s for block in self.large[name] for s in block.reads_s)

    def share_of_raw(self, name: str) -> float:
        return statistics.median(self.raw_s) / self.read_s(name)

    @property
    def hook_s(self) -> float:
        return statistics.median(s for block in self.small[STATS] for s in block.hooks_s)


def _report(measured: _Measured) -> Report:
    small, large = measured.small, measured.large
    return Report(
        name="gradients",
        tables=[_small_table(measured), _large_table(measured)],
        goals=_goals(measured),
        notes=_notes(measured),
        numbers={
            "extra_s": {name: measured.added_s(name) for name in small},
            "added_cpu_s": {name: measured.added_cpu_s(name) for name in small},
            "memcpy_s": measured.memcpy_s, "floor_read_s": measured.scan_s,
            "hook_s": measured.hook_s, "raw_s": list(measured.raw_s),
            "steps_s": {n: [b.steps_s for b in blocks] for n, blocks in small.items()},
            "whole_steps_s": {n: [b.steps_s for b in blocks] for n, blocks in large.items()},
        },
    )  # fmt: skip


def _small_table(measured: _Measured) -> Table:
    bare_s = _median(measured.small[BARE])
    return Table(
        title=f"Statistics each step, {measured.small_bytes / 4e6:.0f}M parameters, DDP x2",
        header=["contender", "step, ms", "ratio", "CPU ms a step", "added", "frames of steps"],
        rows=[
            [
                name,
                f"{1e3 * _median(blocks):.1f}",
                f"{_median(blocks) / bare_s:.3f}",
                f"{1e3 * _cpu(blocks):.0f}",
                f"{1e3 * measured.added_cpu_s(name):+.0f}",
                _share(blocks),
            ]
            for name, blocks in measured.small.items()
        ],
    )


def _large_table(measured: _Measured) -> Table:
    large, size_gib = measured.large, measured.large_bytes / 2**30
    bare_s, bare_cpu_s = _median(large[BARE]), _cpu(large[BARE])
    return Table(
        title=f"Whole gradients each step, {measured.large_bytes / 2**20:.0f} MiB, DDP x2",
        header=[
            "contender", "step, ms", "ratio", "s of step per GiB", "CPU s per GiB",
            "frames of steps", "GB/s read", "share of a raw socket",
        ],
        rows=[
            [
                name,
                f"{1e3 * _median(large[name]):.1f}",
                f"{_median(large[name]) / bare_s:.3f}",
                f"{(_median(large[name]) - bare_s) / size_gib:.2f}",
                f"{(_cpu(large[name]) - bare_cpu_s) / size_gib:.2f}",
                _share(large[name]),
                f"{measured.large_bytes / measured.read_s(name) / 1e9:.2f}",
                f"{measured.share_of_raw(name):.2f}",
            ]
            for name in (FULL_HOST, FULL_GRPC)
        ],
    )  # fmt: skip


def _goals(measured: _Measured) -> list[Goal]:
    small, large, added = measured.small, measured.large, measured.added_cpu_s
    bare_s = _median(small[BARE])
    # Replicas share the work: each rank captures half of what DDP has on both.
    copies = measured.hook_s / (measured.memcpy_s / WORLD_SIZE)
    return [
        Goal(what="statistics: added CPU / that of wandb.watch's pass",
             measured=added(STATS) / added(WATCH), limit=0.1),
        Goal(what="statistics: added CPU / that of torch.histc's pass",
             measured=added(STATS) / added(HISTC), limit=0.1),
        Goal(what="histogram: added CPU / that of wandb.watch's pass",
             measured=added(HISTOGRAM) / added(WATCH), limit=0.1),
        Goal(what="statistics: step time ratio", measured=_median(small[STATS]) / bare_s,
             limit=1 + 0.1 * measured.added_s(WATCH) / bare_s),
        Goal(what="capture in memcpys of what is captured", measured=copies, limit=1.5),
        Goal(what="pre-hook without a reader", unit="us",
             measured=1e6 * statistics.median(measured.empty_s), limit=10),
        Goal(what="whole gradients: share of a raw socket", at_least=True, limit=0.42,
             measured=max(measured.share_of_raw(name) for name in (FULL_HOST, FULL_GRPC))),
        Goal(what="whole gradients, gRPC: step time ratio",
             measured=_median(large[FULL_GRPC]) / _median(large[BARE]), limit=1.10),
    ]  # fmt: skip


def _notes(measured: _Measured) -> list[str]:
    floor_s = measured.memcpy_s + measured.scan_s
    return [
        f"Bare steps take {1e3 * _median(measured.small[BARE]):.0f} ms (small) and "
        f"{1e3 * _median(measured.large[BARE]):.0f} ms "
        "(large); trainers, sidecars and the reader share the cores, so whatever a sidecar "
        "computes is taken from training here. Passes of W&B's kind run on rank 0 alone, as "
        "it does. Raw sockets are measured while the ranks train. Where cores are busy the "
        "added CPU is what training loses, and it is the steadier figure.",
        f"The floor: to copy all gradients once takes {1e3 * measured.memcpy_s:.1f} ms of CPU, to "
        f"read the copy once {1e3 * measured.scan_s:.1f} ms; together "
        f"{floor_s / measured.added_cpu_s(WATCH):.3f} of what wandb.watch's pass takes.",
    ]


def _share(blocks: Sequence[Block]) -> str:
    frames, offered = sum(b.frames for b in blocks), sum(b.offered for b in blocks)
    return f"{frames} of {offered}" if offered else ""
