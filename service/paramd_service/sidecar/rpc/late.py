"""Calls whose code is loaded on first use: most sidecars need none of it, and stay small.

Exports, for the control plane only; Summon and gradients for thin clients, for which this sidecar
gathers from all ranks and streams whole tensors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.auth import Answers, Call, CallTable, Unary

if TYPE_CHECKING:
    from paramd_service.sidecar.rpc.export_service import Exports
    from paramd_service.sidecar.rpc.relay import Gatherer


class Gateway:
    """Summon and gradients, whose gathering code is loaded on first use."""

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._gatherer: Gatherer | None = None

    async def summon(
        self, request: pb.SummonRequest, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield serialized SummonResponses. Raises as a client's `summon`."""
        gatherer = await self._current()
        async with aclosing(gatherer.summon(request, timeout_s)) as parts:
            async for part in parts:
                yield part

    async def gradients(
        self, request: pb.StreamGradientsRequest, _timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield serialized StreamGradientsResponses until the caller leaves or training detaches.
        Raises as a client's `grads`."""
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


def export_calls(rank: RankSidecar) -> CallTable:
    late = _Late(rank)
    return {
        "BeginExport": Call(unary=late.one("begin")),
        "WriteExportFile": Call(answers=late.many("write")),
        "StoreExportFile": Call(requests=late.one("store")),
        "VerifyExportFile": Call(answers=late.many("verify")),
        "ReadExportFile": Call(answers=late.many("read")),
        "FinishExport": Call(unary=late.one("finish"), heavy=True),
        "DropExport": Call(unary=late.one("drop"), heavy=True),
    }


class _Late:
    """Methods of an `Exports` that is created at the first call."""

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._made: Exports | None = None

    def one(self, name: str) -> Unary:
        """A method with one answer, of one request or a stream of them."""

        async def call(request: Any, timeout_s: float) -> Message:
            found: Message = await self._method(name)(request, timeout_s)
            return found

        return call

    def many(self, name: str) -> Answers:
        """A method that answers with a stream."""

        async def call(request: Any, timeout_s: float) -> AsyncGenerator[bytes, None]:
            async with aclosing(self._method(name)(request, timeout_s)) as messages:
                async for message in messages:
                    yield message

        return call

    def _method(self, name: str) -> Any:
        if self._made is None:
            from paramd_service.sidecar.rpc.export_service import Exports

            self._made = Exports(self._rank)
        return getattr(self._made, name)
