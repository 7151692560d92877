"""The sidecars of a mesh, called as any client calls them. Loaded on first use."""

from __future__ import annotations

from collections.abc import Callable

from paramd.errors import UsageError
from paramd.mesh.peers.control import JobDocument, PeerAddress
from paramd.mesh.peers.grpc import Background, Channels
from paramd.mesh.peers.sidecars import Sidecars
from paramd_service.sidecar.owner import Mesh
from paramd_service.sidecar.rank import RankSidecar


class Peers:
    """All ranks' sidecars, with a caller's ticket: this sidecar itself has no rights there."""

    def __init__(self, rank: RankSidecar, mesh: Mesh, ticket: Callable[[], str]) -> None:
        """No I/O."""
        self.mesh = mesh
        self._rank = rank
        self._background = Background()
        self._channels = Channels(lambda _rank: ticket(), job_tls=rank.job_tls)

    async def close(self) -> None:
        await self._background.close()
        await self._channels.close()

    async def sidecars(self) -> Sidecars:
        """Those of the mesh. Raises UsageError when the trainer has ended."""
        return Sidecars(self._channels, self.document, self._background)

    @property
    def document(self) -> JobDocument:
        """The job as this sidecar knows it, without a ticket."""
        attached = self._rank.attached
        if attached is None:
            raise UsageError("the trainer has ended")
        return JobDocument(
            job=self._rank.config.job,
            incarnation=attached.incarnation,
            world_size=attached.request.world_size,
            control_address=self.mesh.control_address,
            layout_digest=self.mesh.layout_digest,
            peers={
                peer.rank: PeerAddress(peer.rank, peer.address, peer.socket_path, peer.host_id)
                for peer in self.mesh.peers
            },
            ticket="",
            ticket_expires_s=0.0,
        )
