"""Memory and descriptors of processes over time; a leak shows as a slope that lasts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

MIB = 1 << 20
WARM_S = 60.0
"""Processes grow while they are new: imports, pools, caches."""


@dataclass
class Series:
    """Samples of one process."""

    began_s: float
    at_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Slope:
    """How one sort of process changed, over all processes of it that lived long enough."""

    name: str
    processes: int
    seconds: float
    rss_bytes_per_hour: float
    descriptors_per_hour: float
    most_bytes: int


class Usage:
    """Samples all processes of a campaign, each from its own beginning on."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, int], Series] = {}

    def sample(self, name: str, process: psutil.Process) -> None:
        """Notes what it holds now."""
        with suppress(psutil.Error, OSError):
            began_s = process.create_time()
            series = self._series.setdefault((name, process.pid), Series(began_s))
            rss_bytes, descriptors = process.memory_info().rss, process.num_fds()
            if time.time() - began_s > WARM_S:
                series.at_s.append(time.monotonic())
                series.rss_bytes.append(rss_bytes)
                series.descriptors.append(descriptors)

    def slopes(self) -> list[Slope]:
        """Least squares over each process; means of those weighted by their time."""
        sorts: dict[str, list[Series]] = defaultdict(list)
        for (name, _), series in self._series.items():
            if len(series.at_s) >= 3:
                sorts[name].append(series)
        return [_slope(name, found) for name, found in sorted(sorts.items())]


def _slope(name: str, found: Sequence[Series]) -> Slope:
    """All processes of a sort in one fit: each is measured from its own means."""
    spread = sum(sum((t - _mean(s.at_s)) ** 2 for t in s.at_s) for s in found)

    def fitted(values: Sequence[Sequence[int]]) -> float:
        moved = sum(
            (t - _mean(s.at_s)) * (v - _mean(of))
            for s, of in zip(found, values, strict=True)
            for t, v in zip(s.at_s, of, strict=True)
        )
        return 3600 * moved / spread if spread else 0.0

    return Slope(
        name=name,
        processes=len(found),
        seconds=sum(s.at_s[-1] - s.at_s[0] for s in found),
        rss_bytes_per_hour=fitted([s.rss_bytes for s in found]),
        descriptors_per_hour=fitted([s.descriptors for s in found]),
        most_bytes=max(max(s.rss_bytes) for s in found),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
