"""A job's directory inside its own control plane: what others fetch over REST, read directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from paramd import clock
from paramd.errors import NotFoundError
from paramd.security.tickets import Role
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.registry import Registry

if TYPE_CHECKING:
    from paramd.mesh.peers.control import JobDocument
    from paramd.mesh.peers.discovery import SidecarFinder

TICKET_TTL_S = 600.0


class OwnDirectory:
    """A `Directory` of one incarnation for the control plane's own reads: statistics, samples and
    the pins of exports. Its ticket is a reader's and names no token; each call names the caller."""

    url = "this control plane"

    def __init__(
        self, bootstrap: Bootstrap, registry: Registry, control_address: Callable[[], str]
    ) -> None:
        """No I/O. `control_address` returns our own gRPC target once it is known."""
        self._mine = bootstrap
        self._registry = registry
        self._control_address = control_address

    def look_again(self) -> None:
        """No-op: our own address does not move."""

    async def jobs(self) -> list[str]:
        """The one job."""
        return [self._mine.job]

    async def job(self, job: str) -> JobDocument:
        """The job's document, with a fresh ticket. Raises NotFoundError for any other job."""
        from paramd.mesh.peers.control import JobDocument, PeerAddress

        mine = self._mine
        if job != mine.job:
            raise NotFoundError(f"job {job[:64]!r} is not this one, {mine.job!r}")
        now_s = clock.now_s()
        ticket = mine.signer.mint(
            job=mine.job, epoch=mine.epoch, role=Role.READER, ttl_s=TICKET_TTL_S, now_s=now_s
        )
        return JobDocument(
            job=mine.job,
            epoch=mine.epoch,
            world_size=mine.world_size,
            control_address=self._control_address(),
            layout_digest=self._registry.view().layout_digest,
            peers={
                peer.rank: PeerAddress(peer.rank, peer.address, peer.socket_path, peer.host_id)
                for peer in self._registry.peers()
            },
            ticket=ticket,
            ticket_expires_s=now_s + TICKET_TTL_S,
        )

    async def close(self) -> None:
        """No-op: nothing is open."""


class OwnFinder:
    """Connections to the sidecars of one incarnation, opened on first use."""

    def __init__(self, directory: OwnDirectory) -> None:
        """No I/O."""
        self._directory = directory
        self._reach: SidecarFinder | None = None
        self._opening = asyncio.Lock()

    async def __call__(self) -> SidecarFinder:
        """Return the open connections, opening them if needed."""
        # The lock: two first callers must not each open a set, of which one would leak.
        async with self._opening:
            if self._reach is None:
                # Lazy import: it is most of what this process would load.
                from paramd.mesh.peers.discovery import SidecarFinder

                reach = SidecarFinder(self._directory, None)
                await reach.start()
                self._reach = reach
            return self._reach

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        async with self._opening:
            if self._reach is not None:
                await self._reach.close()
                self._reach = None
