"""Summon and gradients for thin clients: this sidecar gathers from all ranks, and streams whole
tensors. Its code is loaded at the first call: most sidecars need none of it, and stay small.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.calls import Call, CallTable
from paramd_service.sidecar.parts import SidecarHost, SidecarPart

if TYPE_CHECKING:
    from paramd_service.gateway.gather import Gatherer


class Gateway(SidecarPart):
    """Reads from all ranks on behalf of its caller."""

    name = "gateway"

    def __init__(self, host: SidecarHost) -> None:
        super().__init__(host)
        self._gatherer: Gatherer | None = None

    def calls(self) -> CallTable:
        return {
            "Summon": Call(answers=self._summon),
            "StreamGradients": Call(answers=self._gradients),
        }

    async def _summon(
        self, request: pb.SummonRequest, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield serialized SummonResponses. Raises as a client's `summon`."""
        gatherer = await self._current()
        async with aclosing(gatherer.summon(request, timeout_s)) as parts:
            async for part in parts:
                yield part

    async def _gradients(
        self, request: pb.StreamGradientsRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield serialized StreamGradientsResponses until the caller leaves or training detaches.
        Raises as a client's `grads`."""
        from paramd_service.gateway.gather import stream_gradients

        gatherer = await self._current()
        async with aclosing(stream_gradients(gatherer, request)) as parts:
            async for part in parts:
                yield part

    async def closed(self) -> None:
        """Close the channels to the peers."""
        if self._gatherer is not None:
            gatherer, self._gatherer = self._gatherer, None
            await gatherer.close()

    async def _current(self) -> Gatherer:
        from paramd_service.gateway.gather import Gatherer

        mesh = self.host.ready_mesh()
        if self._gatherer is None or self._gatherer.mesh is not mesh:
            await self.closed()
            self._gatherer = Gatherer(self.host, mesh)
        return self._gatherer
