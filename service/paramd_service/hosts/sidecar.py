"""A rank's host: figures of the machine and its GPUs, and the other hosts that it reaches."""

from __future__ import annotations

import asyncio

from paramd.v1 import common_pb2
from paramd_service.aio import stopped
from paramd_service.hosts.reach import Reach
from paramd_service.hosts.watch import MachineWatch
from paramd_service.sidecar.calls import Call, CallTable
from paramd_service.sidecar.parts import SidecarHost, SidecarPart


class Hosts(SidecarPart):
    """Samples this host every few seconds, and tries the others when asked."""

    name = "hosts"

    def __init__(self, host: SidecarHost) -> None:
        super().__init__(host)
        self._machine = MachineWatch(lambda: host.trainer_pid, host.log)
        self._reach = Reach(host)
        self._sampling: asyncio.Task[None] | None = None

    def calls(self) -> CallTable:
        return {"ReachPeers": Call(unary=self._reach.reach)}

    def started(self) -> None:
        self._sampling = asyncio.get_running_loop().create_task(self._machine.run())

    def report(self, state: common_pb2.RankState) -> None:
        if (found := self._machine.found) is not None:
            state.host.CopyFrom(found)

    async def closed(self) -> None:
        await stopped(self._sampling)
        self._sampling = None
