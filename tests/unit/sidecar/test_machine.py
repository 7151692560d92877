"""What a sidecar sees of its host and its GPUs: counters become shares, and shares reasons.

NVML is simulated: recorded answers stand for a library that needs NVIDIA's driver.
"""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from paramd.v1 import common_pb2
from paramd_service.control.mesh.host import clock_jump_s, host_document, why_slow
from paramd_service.hosts.devices import Devices
from paramd_service.hosts.facts import Sample, facts, sample
from paramd_service.hosts.watch import MachineWatch
from paramd_service.sidecar.log import Log
from tests.longer import wait_until

BEFORE = Sample(
    at_s=100.0, wall_offset_s=1e9, total_s=800.0, idle_s=400.0, disk_wait_s=10.0, stolen_s=5.0,
    trainer_s=50.0, own_s=1.0, delay_s=3.0, swap_in_bytes=0, swap_out_bytes=0,
    disk_busy_s={"sda": 1.0, "sdb": 2.0}, network_bytes=1000, network_lost=0, retransmits=7,
    memory_available_bytes=2 << 30, memory_bytes=8 << 30, memory_pressure=0.0,
)  # fmt: skip
"""Ten seconds on eight processors are between this one and `AFTER`."""
AFTER = replace(BEFORE, at_s=110.0, total_s=880.0, idle_s=480.0)


def state(host: common_pb2.HostFacts) -> common_pb2.RankState:
    return common_pb2.RankState(rank=1, host=host)


def test_a_calm_host_gives_no_reason() -> None:
    found = facts(BEFORE, AFTER)
    assert (found.processors, found.window_ms) == (8, 10_000)
    assert found.busy == found.others == found.stolen == found.trainer_delay == 0.0
    assert why_slow(state(found)) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"idle_s": 408.0, "trainer_s": 56.0, "delay_s": 7.0},
            "its trainer waits 40% of the time for a processor; other processes use 6.6 of 8",
        ),
        ({"stolen_s": 13.0}, "the hypervisor takes 10% of the processors"),
        ({"swap_in_bytes": 50_000_000}, "memory is swapped, 5 MB a second"),
        (
            {"memory_pressure": 0.25},
            "processes wait 25% of the time for memory, of which 2.1 GB are left",
        ),
        ({"disk_busy_s": {"sda": 10.7, "sdb": 2.0}}, "the busiest disk is busy 97% of the time"),
        ({"disk_wait_s": 26.0}, "processors wait 20% of the time for disks"),
        ({"retransmits": 1007}, "TCP sends 100 segments a second again"),
        ({"network_lost": 500}, "the network loses 50 packets a second"),
        ({"wall_offset_s": 1e9 + 3600}, "the host's clock has jumped 3,600 s ahead"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_trouble_of_a_host_is_said(changes: dict[str, Any], reason: str) -> None:
    assert why_slow(state(facts(BEFORE, replace(AFTER, **changes)))).startswith(reason)


def test_what_the_host_does_not_tell_is_unknown_and_no_reason() -> None:
    unknown = {"trainer_s": -1.0, "delay_s": -1.0, "swap_in_bytes": -1, "swap_out_bytes": -1}
    unknown |= {"network_bytes": -1, "network_lost": -1, "retransmits": -1, "memory_pressure": -1.0}
    blind = replace(BEFORE, **unknown, disk_busy_s={})
    found = facts(blind, replace(AFTER, **unknown, disk_busy_s={}))
    assert found.trainer_delay == found.disk_busy == found.retransmits == found.swap_in_bytes == -1
    assert why_slow(state(found)) == ""


def test_a_jump_of_the_clock_is_told_as_long_as_it_lasts() -> None:
    jumped = replace(AFTER, wall_offset_s=1e9 - 60)
    later = replace(jumped, at_s=115.0, total_s=920.0, idle_s=520.0)
    assert clock_jump_s(state(facts(jumped, later, first=BEFORE))) == -60.0
    back = replace(later, wall_offset_s=1e9 + 0.2)
    assert clock_jump_s(state(facts(later, back, first=BEFORE))) == 0.0


def test_old_figures_say_nothing_about_now() -> None:
    found = facts(BEFORE, replace(AFTER, stolen_s=45.0))
    found.age_ms = 59_000
    assert why_slow(state(found))
    found.age_ms = 61_000
    assert why_slow(state(found)) == ""
    assert why_slow(common_pb2.RankState()) == ""
    assert host_document(common_pb2.RankState()) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_does_not_have_is_unknown(wrong: float) -> None:
    found = facts(BEFORE, AFTER)
    found.busy = found.retransmits = wrong
    document = host_document(state(found))
    assert document is not None
    assert (document["busy"], document["retransmits_s"]) == (-1.0, -1.0)
    json.dumps(document, allow_nan=False)


def test_this_host_tells_of_a_process_that_computes() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = sample(busy.pid)

        def seen() -> common_pb2.HostFacts | None:
            found = facts(before, sample(busy.pid))
            return found if found.trainer_processors * found.window_ms >= 100 else None

        found = wait_until(seen)
    finally:
        busy.kill()
        busy.wait()
    assert found.processors >= 1
    assert 0.0 < found.busy <= 1.0
    assert 0 < found.memory_available_bytes < found.memory_bytes


def test_the_watch_compares_samples_of_one_trainer_alone() -> None:
    pids = [os.getpid(), os.getpid(), 1, 1]
    watch = MachineWatch(lambda: pids.pop(0), Log(fields={}))

    async def looks() -> list[bool]:
        told = []
        for _ in range(4):
            await watch.look()
            told.append(watch.found is not None)
        return told

    assert asyncio.run(looks()) == [False, True, True, True]
    assert watch.found is not None
    assert watch.found.age_ms >= 0


class NvmlError(Exception):
    """What the library raises where a GPU does not tell."""


def _unknown(*_: object) -> Any:
    raise NvmlError("not supported")


@dataclass
class Gpu:
    """A simulated GPU with recorded answers."""

    index: int
    reasons: int = 0
    clock_mhz: int = 1980
    celsius: int = 61
    ecc_errors: int = 0
    pids: tuple[int, ...] = ()


@dataclass
class SimulatedNvml:
    """The part of pynvml that the sidecar uses, over recorded answers."""

    gpus: list[Gpu]
    xids: list[tuple[int, int]] = field(default_factory=list)
    refuses: tuple[str, ...] = ()
    closed_count: int = 0
    NVMLError: type[Exception] = NvmlError

    def __getattribute__(self, name: str) -> Any:
        if name in super().__getattribute__("refuses"):
            return _unknown
        return super().__getattribute__(name)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.closed_count += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetIndex(self, gpu: Gpu) -> int:
        return gpu.index

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, kind: int) -> int:
        return gpu.clock_mhz

    def nvmlDeviceGetMaxClockInfo(self, gpu: Gpu, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:
        return gpu.reasons

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        return gpu.celsius

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(used=60 << 30, total=80 << 30)

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        return gpu.ecc_errors

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in gpu.pids]

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, kinds: int, events: object) -> None: ...

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        if not self.xids:
            raise NvmlError("timeout")
        index, xid = self.xids.pop(0)
        return SimpleNamespace(device=self.gpus[index], eventType=8, eventData=xid)

    def nvmlEventSetFree(self, events: object) -> None: ...


def devices_of(library: SimulatedNvml) -> Devices:
    devices = Devices()
    load: Callable[[], Any] = lambda: library  # noqa: E731
    assert devices.open(load)
    return devices


def test_simulated_gpus_of_the_trainer_are_told_alone() -> None:
    library = SimulatedNvml([Gpu(0, pids=(10,)), Gpu(1, pids=(20, 21))])
    devices = devices_of(library)
    assert [one.index for one in devices.facts(21)] == [1]
    assert [one.index for one in devices.facts(99)] == [0, 1]
    told = devices.facts(10)[0]
    assert math.isclose(told.busy, 0.97)
    assert (told.clock_mhz, told.celsius, told.used_bytes) == (1980, 61, 60 << 30)
    devices.close()
    devices.close()
    assert library.closed_count == 1


@pytest.mark.parametrize(
    ("gpu", "xids", "reason"),
    [
        (
            Gpu(0, reasons=0x40, clock_mhz=1200, celsius=88), [],
            "GPU 0 is throttled (heat), at 1,200 of 1,980 MHz and 88 °C",
        ),
        (Gpu(0, reasons=0x04), [], "GPU 0 is throttled (power)"),
        (Gpu(0, ecc_errors=2), [], "GPU 0 has 2 uncorrected memory errors"),
        (Gpu(0), [(0, 79)], "GPU 0 reported Xid 79 (the GPU has fallen off the bus)"),
        (Gpu(0, reasons=0x01 | 0x02), [], ""),
    ],
    ids=["heat", "power", "ecc", "xid", "idle or by choice"],
)  # fmt: skip
def test_each_trouble_of_a_simulated_gpu_is_said(
    gpu: Gpu, xids: list[tuple[int, int]], reason: str
) -> None:
    host = facts(BEFORE, AFTER)
    host.devices.extend(devices_of(SimulatedNvml([gpu], xids=list(xids))).facts(0))
    assert why_slow(state(host)) == reason


def test_a_simulated_gpu_that_tells_little_is_told_with_what_there_is() -> None:
    silent = tuple(
        name for name in dir(SimulatedNvml)
        if name.startswith(("nvmlDeviceGet", "nvmlEvent", "nvmlDeviceRegister"))
        and name not in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    )  # fmt: skip
    (told,) = devices_of(SimulatedNvml([Gpu(0)], refuses=silent)).facts(5)
    assert (told.busy, told.clock_mhz, told.celsius, told.ecc_errors, told.xid) == (
        -1,
        -1,
        -1,
        -1,
        0,
    )
    assert list(told.throttled) == []


def test_a_simulated_gpu_that_fell_off_the_bus_keeps_no_other_from_being_told() -> None:
    class OneIsLost(SimulatedNvml):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
            if index == 0:
                raise NvmlError("GPU is lost")
            return self.gpus[index]

    devices = devices_of(OneIsLost([Gpu(0), Gpu(1, pids=(20,))]))
    assert (
        [one.index for one in devices.facts(20)] == [one.index for one in devices.facts(0)] == [1]
    )


def test_without_nvml_there_are_no_gpus() -> None:
    def missing() -> Any:
        raise ImportError("pynvml")

    devices = Devices()
    assert not devices.open(missing)
    assert devices.facts(1) == []
    devices.close()
    assert not Devices().open(lambda: SimulatedNvml([Gpu(0)], refuses=("nvmlInit",)))  # type: ignore[arg-type,return-value]
