"""Summon for thin clients: this sidecar gathers from all ranks and streams whole tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.auth import Call, CallTable

if TYPE_CHECKING:
    from paramd_service.sidecar.rpc.relay import Gatherer


class Gateway:
    """Loads the gathering code on first use: most sidecars never need it."""

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._gatherer: Gatherer | None = None

    async def summon(
        self, request: pb.SummonRequest, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield serialized SummonResponses.

        Raises:
            ParamdError: as a client's own summon.
        """
        gatherer = await self._current()
        async with aclosing(gatherer.summon(request, timeout_s)) as parts:
            async for part in parts:
                yield part

    async def gradients(
        self, request: pb.StreamGradientsRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield serialized StreamGradientsResponses until the caller leaves or training detaches.

        Raises:
            ParamdError: as a client's own `grads`.
        """
        from paramd_service.sidecar.rpc.relay import stream_gradients

        gatherer = await self._current()
        async with aclosing(stream_gradients(gatherer, request)) as parts:
            async for part in parts:
                yield part

    async def close(self) -> None:
        """Close the channels to the peers."""
        if self._gatherer is not None:
            gatherer, self._gatherer = self._gatherer, None
            await gatherer.close()

    async def _current(self) -> Gatherer:
        from paramd_service.sidecar.rpc.relay import Gatherer

        mesh = self._rank.ready_mesh()
        if self._gatherer is None or self._gatherer.mesh is not mesh:
            await self.close()
            self._gatherer = Gatherer(self._rank, mesh)
        return self._gatherer


def calls(gateway: Gateway) -> CallTable:
    """Methods of this subject."""
    return {
        "Summon": Call(answers=gateway.summon),
        "StreamGradients": Call(answers=gateway.gradients),
    }
