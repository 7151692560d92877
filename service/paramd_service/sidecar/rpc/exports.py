"""Export calls, for the control plane only.

Their code is loaded at the first call: most sidecars never export, and stay small.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from paramd.v1 import export_pb2
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.auth import Answers, Call, CallTable, Requests, Unary

if TYPE_CHECKING:
    from paramd_service.sidecar.rpc.export_service import Exports


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    late = _Late(rank)
    return {
        "BeginExport": Call(request=export_pb2.BeginExportRequest, unary=late.unary("begin")),
        "WriteExportFile": Call(
            request=export_pb2.WriteExportFileRequest, answers=late.answers("write")
        ),
        "StoreExportFile": Call(
            request=export_pb2.StoreExportFileRequest, requests=late.requests("store")
        ),
        "VerifyExportFile": Call(
            request=export_pb2.VerifyExportFileRequest, answers=late.answers("verify")
        ),
        "ReadExportFile": Call(
            request=export_pb2.ReadExportFileRequest, answers=late.answers("read")
        ),
        "FinishExport": Call(
            request=export_pb2.FinishExportRequest, unary=late.unary("finish"), heavy=True
        ),
        "DropExport": Call(
            request=export_pb2.DropExportRequest, unary=late.unary("drop"), heavy=True
        ),
    }


class _Late:
    """Methods of an `Exports` that is created at the first call."""

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._made: Exports | None = None

    def unary(self, name: str) -> Unary:
        async def call(request: Any, timeout_s: float) -> Message:
            found: Message = await self._method(name)(request, timeout_s)
            return found

        return call

    def requests(self, name: str) -> Requests:
        async def call(requests: AsyncIterator[Any], timeout_s: float) -> Message:
            found: Message = await self._method(name)(requests, timeout_s)
            return found

        return call

    def answers(self, name: str) -> Answers:
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
