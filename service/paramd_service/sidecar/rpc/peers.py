"""The sidecars of a mesh, called as any client calls them. Loaded on first use."""

from __future__ import annotations

from collections.abc import Callable

from paramd.errors import UsageError
from paramd.mesh.peers.control import JobDocument, PeerAddress
from paramd.mesh.peers.grpc import Background, Channels
from paramd.mesh.peers.sidecars import Sidecars
from paramd.security.tickets import shown_of
from paramd_service.sidecar.owner import Mesh
from paramd_service.sidecar.parts import SidecarHost


class Peers:
    """All ranks' sidecars, with a caller's ticket: this sidecar itself has no rights there."""

    def __init__(self, rank: SidecarHost, mesh: Mesh, reads: Callable[[], str]) -> None:
        """No I/O. `reads`: the ticket and seed that the caller handed over."""
        self.mesh = mesh
        self._rank = rank
        self._background = Background()
        self._reads = reads
        self._channels = Channels(self.ticket, job_tls=rank.job_tls)

    def ticket(self, number: int | None) -> str:
        """What that rank is shown, None the control plane.

        Raises:
            DeniedError: The caller handed none over.
            UsageError: The trainer has ended.
        """
        return shown_of(self._reads(), number, self._world_size)

    async def close(self) -> None:
        await self._background.close()
        await self._channels.close()

    async def sidecars(self) -> Sidecars:
        """Those of the mesh.

        Raises:
            UsageError: When the trainer has ended.
        """
        return Sidecars(self._channels, self.document, self._background)

    @property
    def document(self) -> JobDocument:
        """The job as this sidecar knows it, without a ticket."""
        return JobDocument(
            job=self._rank.config.job,
            incarnation=self._rank.incarnation,
            world_size=self._world_size,
            control_address=self.mesh.control_address,
            layout_digest=self.mesh.layout_digest,
            peers={
                peer.rank: PeerAddress(peer.rank, peer.address, peer.socket_path, peer.host_id)
                for peer in self.mesh.peers
            },
            ticket="",
            ticket_expires_s=0.0,
        )

    @property
    def _world_size(self) -> int:
        attached = self._rank.attached
        if attached is None:
            raise UsageError("the trainer has ended")
        return attached.request.world_size
