"""AsyncMesh: a running job's parameters, for asyncio programs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from paramd import gone
from paramd.mesh.loop import UNSET, Timeout, allowed_s
from paramd.mesh.parts.added import AddedParts
from paramd.mesh.parts.doctor import DoctorPart
from paramd.mesh.parts.exports import ExportsPart
from paramd.mesh.parts.host import MeshHost
from paramd.mesh.parts.insight import InsightPart
from paramd.mesh.parts.integrity import IntegrityPart
from paramd.mesh.parts.statistics import StatisticsPart
from paramd.mesh.parts.streams import StreamsPart
from paramd.mesh.peers.control import Find, RestClient
from paramd.mesh.peers.discovery import JobRest, SidecarFinder
from paramd.mesh.peers.relay import TunnelRelay
from paramd.mesh.reading.stream import keep_freed_memory
from paramd.mesh.reading.transfer import Transfer
from paramd.security.tls import ClientTls


@gone.tells
class AsyncMesh(ExportsPart, StreamsPart, StatisticsPart, InsightPart, IntegrityPart, DoctorPart):
    """A running job, accessed from outside. Use as `async with`, or call `close`.

    Every result is of one (run, step). Methods may run concurrently. A cancelled call
    releases its pins; `close` leaves no task behind.

    `timeout=` is in seconds, or a text such as "5s", for a whole call; None means no limit. Every
    call raises UnreachableError if the control plane, or a sidecar that it needs, does not respond.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        job: str | None = None,
        timeout: Timeout = UNSET,
        tls: ClientTls | None = None,
        find: Find | None = None,
    ) -> None:
        """No I/O. `paramd.aio.connect` finds url and token.

        Args:
            url: The control plane's, for example "http://127.0.0.1:8470".
            token: Its token.
            job: Name of the job; optional when the control plane serves only one.
            timeout: As in `connect`.
            tls: Trust settings for https; None reads them from the environment.
            find: Returns the current url and token, for a job whose next run may have
                others.
        """
        allowed = allowed_s(timeout)
        rest = RestClient(url, token, tls=tls, find=find)
        reach = SidecarFinder(rest, job, tls=tls, relay=TunnelRelay(rest))
        super().__init__(MeshHost(rest, JobRest(rest, reach), reach, Transfer(), allowed))
        self._added = AddedParts(self._host)

    def __await__(self) -> Generator[Any, None, AsyncMesh]:
        """`mesh = await paramd.aio.connect()`: as `async with`, for callers of `close`."""
        return self.__aenter__().__await__()

    async def __aenter__(self) -> AsyncMesh:
        # Before gRPC starts threads: the limit on malloc arenas applies to new ones only.
        keep_freed_memory()
        try:
            await self._host.rest.begun(self._host.timeout_s)
            await self._host.reach.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release open views, leases, connections and threads. Idempotent."""
        await self._added.close()
        await self._closed()
        await self._host.reach.close()
        self._host.transfer.close()
        self._host.memory.close()

    @property
    def parts(self) -> AddedParts:
        """What installed packages add: `await mesh.parts.NAME.METHOD()`, see docs/parts.md."""
        return self._added

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._host.reach.document.job

    @property
    def url(self) -> str:
        """URL of the control plane and its dashboard."""
        return self._host.rest.url

    @property
    def incarnation(self) -> int:
        """Last known run of the job."""
        return self._host.reach.document.incarnation

    @property
    def world_size(self) -> int:
        """Ranks of the job, as last known."""
        return self._host.reach.document.world_size
