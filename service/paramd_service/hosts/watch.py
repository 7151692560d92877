"""Samples the host every few seconds, beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paramd.v1 import common_pb2
from paramd_service.hosts.devices import Devices
from paramd_service.hosts.facts import Sample, facts, sample
from paramd_service.sidecar.log import Log

FIRST_S = 1.0
"""Seconds between the first two samples."""

EVERY_S = 5.0
"""Seconds between two samples; one costs about a millisecond of processor time."""


class MachineWatch:
    """What the sidecar last saw of its host. Event loop only, but for the samples themselves."""

    def __init__(self, trainer_pid: Callable[[], int], log: Log) -> None:
        """No I/O.

        Args:
            trainer_pid: Gives the pid of the rank's trainer; 0 while there is none, or where its
                pid means nothing.
        """
        self._trainer_pid = trainer_pid
        self._log = log
        self._devices = Devices()
        self._first: Sample | None = None
        self._last: tuple[int, Sample] | None = None
        self._found: common_pb2.HostFacts | None = None
        self._found_at_s = 0.0

    @property
    def found(self) -> common_pb2.HostFacts | None:
        """The last figures with their age; None before the second sample."""
        if self._found is not None:
            self._found.age_ms = round(1e3 * (time.monotonic() - self._found_at_s))
        return self._found

    async def run(self) -> None:
        """Sample until cancelled. A sample that fails is logged once, and tried again."""
        failed, pause_s = False, FIRST_S
        await asyncio.to_thread(self._devices.open)
        try:
            while True:
                try:
                    await self.look()
                except (OSError, RuntimeError, ValueError, NotImplementedError) as error:
                    if not failed:
                        self._log("host-unknown", reason=repr(error))
                    failed = True
                await asyncio.sleep(pause_s)
                pause_s = EVERY_S
        finally:
            self._devices.close()

    async def look(self) -> None:
        """Take one sample, and compare it with the one before. Raises what psutil raises."""
        pid = self._trainer_pid()
        now, devices = await asyncio.to_thread(self._sampled, pid)
        if self._first is None:
            self._first = now
        # Counters of another trainer say nothing about this one.
        if self._last is not None and self._last[0] == pid:
            found = facts(self._last[1], now, first=self._first)
            found.devices.extend(devices)
            self._found, self._found_at_s = found, time.monotonic()
        self._last = pid, now

    def _sampled(self, pid: int) -> tuple[Sample, list[common_pb2.DeviceFacts]]:
        return sample(pid), self._devices.facts(pid)
