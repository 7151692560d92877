"""Export calls, for the control plane only.

Their code is loaded at the first call: most sidecars never export, and stay small.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.auth import Answers, Call, CallTable, Unary

if TYPE_CHECKING:
    from paramd_service.sidecar.rpc.export_service import Exports


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
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
