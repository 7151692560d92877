"""What a round of samples costs: CPU time of this process and of the sidecars on this host, and the
waits that it causes in the training.

Sidecars of other hosts do the same work as ours, so the busiest host that can be seen stands for
all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paramd_service.control.mesh.registry import Report

MAX_SIDECARS = 16
"""Sidecars of this host whose CPU time is read; more are counted as these are."""
_SIDECAR = b"paramd_service.sidecar"


@dataclass(frozen=True, slots=True)
class Spent:
    """What has been spent up to a moment, in seconds."""

    cpu_s: float
    stalled_s: Mapping[int, float]
    """Total wait of each rank's updates for copies, as far as it is reported."""

    def since(self, before: Spent, *, anyhow_s: float = 0.0) -> float:
        """Seconds of a core, or of the training, whichever is more, since `before`. `anyhow_s`:
        what the processes would have used of a core in that time for other things."""
        cpu_s = self.cpu_s - before.cpu_s - anyhow_s
        return max(cpu_s, longest(self.stalled_s, before.stalled_s), 0.0)


def stalled(reports: Sequence[Report]) -> Mapping[int, float]:
    """Total wait of each rank's updates for copies, in seconds."""
    return {one.rank: one.state.stall_total_ns / 1e9 for one in reports}


def longest(now: Mapping[int, float], before: Mapping[int, float]) -> float:
    """Longest wait of a rank between two times; 0 of a rank that was not there before."""
    return max((total_s - before.get(rank, total_s) for rank, total_s in now.items()), default=0.0)


def spent(reports: Sequence[Report]) -> Spent:
    """What the process, and the sidecars that report from this host, have spent."""
    here = [one.state.sidecar_pid for one in reports if _is_sidecar(one.state.sidecar_pid)]
    read = [_cpu_s(pid) for pid in here[:MAX_SIDECARS]]
    times = len(here) / len(read) if read else 0.0
    return Spent(time.process_time() + times * sum(read), stalled(reports))


def _is_sidecar(pid: int) -> bool:
    """Whether the process of this number is a sidecar here: one on another host has numbers of its
    own."""
    try:
        return pid > 0 and _SIDECAR in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _cpu_s(pid: int) -> float:
    """CPU time of a process's threads; 0 of one that has ended."""
    total_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return total_ns / 1e9
