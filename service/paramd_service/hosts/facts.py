"""The host in figures over the time between two samples: processors, memory, disks, network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from paramd.v1 import common_pb2

UNKNOWN = -1.0

_PRESSURE = Path("/proc/pressure/memory")
_TCP = Path("/proc/net/snmp")
_NS = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Counters at one time. Those that the host does not have are negative."""

    at_s: float
    """Seconds of the clock that never jumps."""
    wall_offset_s: float
    """Wall clock minus that clock."""
    total_s: float
    """Processor time of the host: all processors, all uses."""
    idle_s: float
    disk_wait_s: float
    stolen_s: float
    trainer_s: float
    """Processor time of the trainer."""
    own_s: float
    """Processor time of this process."""
    delay_s: float
    """Time that the trainer's main thread waited for a processor."""
    swap_in_bytes: int
    swap_out_bytes: int
    disk_busy_s: dict[str, float]
    """By disk."""
    network_bytes: int
    network_lost: int
    retransmits: int
    memory_available_bytes: int
    memory_bytes: int
    memory_pressure: float


def sample(trainer_pid: int) -> Sample:
    """Read all counters; takes about a millisecond. `trainer_pid` is 0 where it means nothing."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    processors = psutil.cpu_times()
    memory, own = psutil.virtual_memory(), os.times()
    sent_bytes, lost = _network()
    swapped_in, swapped_out = _swapped()
    return Sample(
        at_s=now_s,
        wall_offset_s=time.time() - now_s,
        # Guests' time is within user's.
        total_s=sum(processors[:8]),
        idle_s=processors.idle + processors.iowait,
        disk_wait_s=processors.iowait,
        stolen_s=processors.steal,
        trainer_s=_processor_s(trainer_pid),
        own_s=own.user + own.system,
        delay_s=_delay_s(trainer_pid),
        swap_in_bytes=swapped_in,
        swap_out_bytes=swapped_out,
        disk_busy_s=_disks(),
        network_bytes=sent_bytes,
        network_lost=lost,
        retransmits=_retransmits(),
        memory_available_bytes=memory.available,
        memory_bytes=memory.total,
        memory_pressure=_pressure(),
    )


def facts(before: Sample, now: Sample, *, first: Sample | None = None) -> common_pb2.HostFacts:
    """What the host did between two samples. `first` is the sample that a jump of the clock is
    measured from. Pure."""
    window_s = max(now.at_s - before.at_s, 1e-3)
    total_s = max(now.total_s - before.total_s, 1e-3)
    processors = total_s / window_s

    def share(of: Callable[[Sample], float]) -> float:
        return min(max((of(now) - of(before)) / total_s, 0.0), 1.0)

    def rate(of: Callable[[Sample], float]) -> float:
        known = min(of(before), of(now)) >= 0
        return max(of(now) - of(before), 0.0) / window_s if known else UNKNOWN

    busy = 1.0 - share(lambda one: one.idle_s)
    stolen = share(lambda one: one.stolen_s)
    disk_wait = share(lambda one: one.disk_wait_s)
    trainer = rate(lambda one: one.trainer_s)
    trainer_delay = rate(lambda one: one.delay_s)
    swap_in_bytes = rate(lambda one: one.swap_in_bytes)
    swap_out_bytes = rate(lambda one: one.swap_out_bytes)
    network_bytes = rate(lambda one: one.network_bytes)
    network_lost = rate(lambda one: one.network_lost)
    retransmits = rate(lambda one: one.retransmits)
    own = max(trainer, 0.0) + rate(lambda one: one.own_s)
    began = first if first is not None else before
    return common_pb2.HostFacts(
        window_ms=round(1e3 * window_s),
        processors=round(processors),
        busy=busy,
        others=max(busy - stolen - own / processors, 0.0),
        stolen=stolen,
        disk_wait=disk_wait,
        trainer_processors=trainer,
        trainer_delay=min(trainer_delay, 1.0),
        memory_available_bytes=now.memory_available_bytes,
        memory_bytes=now.memory_bytes,
        memory_pressure=now.memory_pressure,
        swap_in_bytes=swap_in_bytes,
        swap_out_bytes=swap_out_bytes,
        disk_busy=_busiest(before, now, window_s),
        network_bytes=network_bytes,
        network_lost=network_lost,
        retransmits=retransmits,
        clock_jump_ms=round(1e3 * (now.wall_offset_s - began.wall_offset_s)),
    )


def _busiest(before: Sample, now: Sample, window_s: float) -> float:
    shares = [
        (busy_s - before.disk_busy_s[name]) / window_s
        for name, busy_s in now.disk_busy_s.items()
        if name in before.disk_busy_s
    ]
    return min(max(shares), 1.0) if shares else UNKNOWN


def _processor_s(pid: int) -> float:
    if not pid:
        return UNKNOWN
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return UNKNOWN


def _delay_s(pid: int) -> float:
    """The second number of schedstat; kernels without it tell nothing."""
    if not pid:
        return UNKNOWN
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / _NS
    return UNKNOWN


def _swapped() -> tuple[int, int]:
    # psutil warns, once, where /proc/vmstat lacks these lines, as in some sandboxes.
    with suppress(OSError, ValueError, RuntimeWarning):
        swap = psutil.swap_memory()
        return swap.sin, swap.sout
    return -1, -1


def _disks() -> dict[str, float]:
    with suppress(OSError, NotImplementedError, RuntimeError):
        found = psutil.disk_io_counters(perdisk=True)
        # Partitions' time is within their disk's; the busiest one is asked for, so both may stay.
        return {name: one.busy_time / 1e3 for name, one in (found or {}).items()}
    return {}


def _network() -> tuple[int, int]:
    with suppress(OSError):
        outside = [one for name, one in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        return (
            sum(one.bytes_sent + one.bytes_recv for one in outside),
            sum(one.errin + one.errout + one.dropin + one.dropout for one in outside),
        )
    return -1, -1


def _retransmits() -> int:
    with suppress(OSError, ValueError):
        names, values = (
            line.split() for line in _TCP.read_text().splitlines() if line.startswith("Tcp:")
        )
        return int(values[names.index("RetransSegs")])
    return -1


def _pressure() -> float:
    """Share of the last ten seconds; needs a kernel with pressure stall information."""
    with suppress(OSError, ValueError, IndexError):
        return float(_PRESSURE.read_text().split()[1].removeprefix("avg10=")) / 100
    return UNKNOWN
