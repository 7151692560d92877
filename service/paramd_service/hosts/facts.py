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
    """What the host did between two samples. Pure.

    Args:
        before: The sample that the window begins with.
        now: The sample that it ends with.
        first: The sample that a jump of the clock is measured from; None: `before`.
    """
    window = _Window(before, now)
    began = first if first is not None else before
    return common_pb2.HostFacts(
        window_ms=round(1e3 * window.length_s),
        processors=round(window.processors),
        busy=window.busy,
        others=window.others,
        stolen=window.stolen,
        disk_wait=window.share(lambda sample: sample.disk_wait_s),
        trainer_processors=window.trainer,
        trainer_delay=min(window.rate(lambda sample: sample.delay_s), 1.0),
        memory_available_bytes=now.memory_available_bytes,
        memory_bytes=now.memory_bytes,
        memory_pressure=now.memory_pressure,
        swap_in_bytes=window.rate(lambda sample: sample.swap_in_bytes),
        swap_out_bytes=window.rate(lambda sample: sample.swap_out_bytes),
        disk_busy=window.busiest_disk,
        network_bytes=window.rate(lambda sample: sample.network_bytes),
        network_lost=window.rate(lambda sample: sample.network_lost),
        retransmits=window.rate(lambda sample: sample.retransmits),
        clock_jump_ms=round(1e3 * (now.wall_offset_s - began.wall_offset_s)),
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """The time between two samples."""

    before: Sample
    now: Sample

    @property
    def length_s(self) -> float:
        return max(self.now.at_s - self.before.at_s, 1e-3)

    @property
    def total_s(self) -> float:
        """Processor time that there was."""
        return max(self.now.total_s - self.before.total_s, 1e-3)

    @property
    def processors(self) -> float:
        return self.total_s / self.length_s

    def share(self, counter: Callable[[Sample], float]) -> float:
        """Part of the processor time that a counter grew by, from 0 to 1."""
        return min(max((counter(self.now) - counter(self.before)) / self.total_s, 0.0), 1.0)

    def rate(self, counter: Callable[[Sample], float]) -> float:
        """Growth of a counter per second; `UNKNOWN` if the host does not have it."""
        before, now = counter(self.before), counter(self.now)
        known = min(before, now) >= 0
        return max(now - before, 0.0) / self.length_s if known else UNKNOWN

    @property
    def busy(self) -> float:
        return 1.0 - self.share(lambda sample: sample.idle_s)

    @property
    def stolen(self) -> float:
        return self.share(lambda sample: sample.stolen_s)

    @property
    def trainer(self) -> float:
        """Processors that the trainer used."""
        return self.rate(lambda sample: sample.trainer_s)

    @property
    def others(self) -> float:
        """Part of the processor time that other processes on this host used."""
        own = max(self.trainer, 0.0) + self.rate(lambda sample: sample.own_s)
        return max(self.busy - self.stolen - own / self.processors, 0.0)

    @property
    def busiest_disk(self) -> float:
        """Share of the window in which the busiest disk was busy."""
        shares = [
            (busy_s - self.before.disk_busy_s[name]) / self.length_s
            for name, busy_s in self.now.disk_busy_s.items()
            if name in self.before.disk_busy_s
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
        counters = psutil.disk_io_counters(perdisk=True)
        # Partitions' time is within their disk's; the busiest one is asked for, so both may stay.
        return {name: disk.busy_time / 1e3 for name, disk in (counters or {}).items()}
    return {}


def _network() -> tuple[int, int]:
    with suppress(OSError):
        counters = psutil.net_io_counters(pernic=True)
        outside = [card for name, card in counters.items() if name != "lo"]
        return (
            sum(card.bytes_sent + card.bytes_recv for card in outside),
            sum(card.errin + card.errout + card.dropin + card.dropout for card in outside),
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
