"""Shuffled rounds, medians, CPU seconds and page faults: how every figure here is taken.

These machines are shared and noisy: a rate alone says little. So every contender runs
once in each round, in shuffled order; ratios are taken of medians of one run; CPU
seconds per GiB and page faults, which are steadier, stand beside them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

GIB = 1 << 30


@dataclass(slots=True)
class Sample:
    """One run of one contender."""

    seconds: float
    cpu_s: float
    page_faults: int


@dataclass(slots=True)
class Series:
    """All runs of one contender."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median wall time in seconds."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def spread_s(self) -> tuple[float, float]:
        """Fastest and slowest run in seconds."""
        times = [sample.seconds for sample in self.samples]
        return min(times), max(times)

    @property
    def cpu_s(self) -> float:
        """Median CPU time of all watched processes in seconds."""
        return statistics.median(sample.cpu_s for sample in self.samples)

    @property
    def page_faults(self) -> float:
        """Median of minor page faults of all watched processes."""
        return statistics.median(sample.page_faults for sample in self.samples)


def run_rounds(
    contenders: Mapping[str, Callable[[], float | None]],
    *,
    rounds: int,
    warm_ups: int = 3,
    watched: Callable[[], Iterable[int]] = lambda: (),
    before: Callable[[str], None] = lambda _: None,
    seed: int = 0,
) -> dict[str, Series]:
    """Runs every contender once a round, in shuffled order.

    Args:
        contenders: each does its work once; it returns its own measure in seconds where
            the caller's clock would be wrong (work in other processes), else None.
        watched: pids whose CPU time and page faults count; ended ones count nothing.
        before: called with the contender's name before every run, unmeasured.
    """
    shuffle = random.Random(seed)
    series = {name: Series(name) for name in contenders}
    for round_ in range(rounds + warm_ups):
        for name in shuffle.sample(sorted(contenders), len(contenders)):
            before(name)
            sample = _measure(contenders[name], list(watched()))
            if round_ >= warm_ups:
                series[name].samples.append(sample)
    return series


def _measure(contender: Callable[[], float | None], pids: Sequence[int]) -> Sample:
    before = _usage(pids)
    begin_s = time.perf_counter()
    own_s = contender()
    seconds = time.perf_counter() - begin_s
    after = _usage(pids)
    return Sample(
        seconds=own_s if own_s is not None else seconds,
        cpu_s=after[0] - before[0],
        page_faults=after[1] - before[1],
    )


def _usage(pids: Sequence[int]) -> tuple[float, int]:
    cpu_s, faults = 0.0, 0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
            with open(f"/proc/{pid}/stat") as stat:
                faults += int(stat.read().rpartition(")")[2].split()[7])
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
        cpu_s += times.user + times.system
    return cpu_s, faults
