"""One rank's pinned snapshot as a stream of chunks that can begin anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from paramd.mesh.channels import Channels
from paramd.mesh.chunk import Chunk
from paramd.mesh.pin import RankPin
from paramd.v1 import sidecar_pb2


class SnapshotSource:
    """One rank's pinned snapshot over a stream."""

    def __init__(
        self,
        channels: Channels,
        pin: RankPin,
        *,
        address: str,
        who: str,
        probe: Callable[[], Awaitable[None]],
        end_bytes: int = 0,
    ) -> None:
        """`who` names the rank in errors, `end_bytes` (0: the end) is where reading ends."""
        self._channels = channels
        self._pin = pin
        self._address = address
        self._probe = probe
        self._end_bytes = end_bytes
        self.rank = pin.rank
        self.who = who

    def chunks(self, offset_bytes: int, timeout_s: float) -> AsyncIterator[Chunk]:
        """The snapshot's bytes from `offset_bytes` on."""
        request = sidecar_pb2.ReadSnapshotRequest(
            snapshot_id=self._pin.snapshot_id,
            offset_bytes=offset_bytes,
            size_bytes=max(self._end_bytes - offset_bytes, 0),
        )
        return self._channels.read(self._address, request, timeout_s=timeout_s)

    async def probe(self) -> None:
        """Raises RankUnreachableError when nobody answers there."""
        await self._probe()
