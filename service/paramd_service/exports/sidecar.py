"""A rank's share of an export. Its code is loaded at the first call: most sidecars write none."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.message import Message

from paramd_service.sidecar.calls import Answers, Call, CallTable, Unary
from paramd_service.sidecar.parts import SidecarHost, SidecarPart

if TYPE_CHECKING:
    from paramd_service.exports.files import RankExports

_UnaryOf: TypeAlias = "Callable[[RankExports], Unary]"
_AnswersOf: TypeAlias = "Callable[[RankExports], Answers]"


class Exports(SidecarPart):
    """Writes, reads and checks files of exports, for the control plane alone."""

    name = "exports"

    def __init__(self, host: SidecarHost) -> None:
        super().__init__(host)
        self._made: RankExports | None = None

    def calls(self) -> CallTable:
        return {
            "BeginExport": Call(unary=self._one(lambda made: made.begin)),
            "WriteExportFile": Call(answers=self._many(lambda made: made.write)),
            "StoreExportFile": Call(requests=self._store),
            "VerifyExportFile": Call(answers=self._many(lambda made: made.verify)),
            "ReadExportFile": Call(answers=self._many(lambda made: made.read)),
            "FinishExport": Call(unary=self._one(lambda made: made.finish), heavy=True),
            "DropExport": Call(unary=self._one(lambda made: made.drop), heavy=True),
        }

    def _one(self, method: _UnaryOf) -> Unary:
        async def call(request: Any, timeout_s: float) -> Message:
            return await method(self._loaded())(request, timeout_s)

        return call

    def _many(self, method: _AnswersOf) -> Answers:
        async def call(request: Any, timeout_s: float) -> AsyncGenerator[bytes, None]:
            async with aclosing(method(self._loaded())(request, timeout_s)) as messages:
                async for message in messages:
                    yield message

        return call

    async def _store(self, requests: AsyncIterator[Any], timeout_s: float) -> Message:
        return await self._loaded().store(requests, timeout_s)

    def _loaded(self) -> RankExports:
        if self._made is None:
            from paramd_service.exports.files import RankExports

            self._made = RankExports(self.host)
        return self._made
