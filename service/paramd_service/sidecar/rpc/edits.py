"""Edit calls: staging, progress, preview and dropping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError, Message

from paramd.errors import UsageError
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import Chunk, parse_chunk
from paramd_service.sidecar.edits.entry import Entry, Phase
from paramd_service.sidecar.edits.receive import copy_of
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.rpc.auth import CALLER_TICKET
from paramd_service.sidecar.rpc.edit_peers import copy_from_peer
from paramd_service.sidecar.rpc.edit_preview import preview
from paramd_service.sidecar.rpc.methods import Call, CallTable

_DATA_TAG = b"\x0a"
_FIRST = "the first message names the manifest, and only the first"


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    subject = _EditCalls(rank)
    return {
        "StageEdit": Call(request=pb.StageEditRequest, requests=subject.stage, part=_part),
        "GetEdit": Call(request=pb.GetEditRequest, unary=subject.get),
        "PreviewEdit": Call(request=pb.PreviewEditRequest, unary=subject.preview, heavy=True),
        "DropEdit": Call(request=pb.DropEditRequest, unary=subject.drop),
    }


class _EditCalls:
    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank

    async def stage(
        self, requests: AsyncIterator[pb.StageEditRequest | Chunk], timeout_s: float
    ) -> Message:
        rank, entry = self._rank, None
        async with asyncio.timeout(timeout_s):
            async for request in requests:
                if isinstance(request, pb.StageEditRequest) != (entry is None):
                    raise UsageError(f"manifest: {_FIRST}")
                if isinstance(request, pb.StageEditRequest):
                    rank.check_plan(request.manifest.epoch, request.manifest.layout_digest)
                    entry = await rank.edits.begin(request.manifest)
                    if request.HasField("copy_from_rank"):
                        await copy_from_peer(
                            rank, entry, request.copy_from_rank, CALLER_TICKET.get()
                        )
                    continue
                assert entry is not None
                fill = copy_of(request)
                await rank.edits.take(entry, [(request.offset_bytes, request.size_bytes, fill)])
        if entry is None:
            raise UsageError(f"manifest: the stream was empty; {_FIRST}")
        return pb.StageEditResponse(header=self._header(entry), progress=entry.progress())

    async def get(self, request: pb.GetEditRequest, _timeout_s: float) -> Message:
        entry = self._rank.edits.get(request.edit_id)
        return pb.GetEditResponse(header=self._header(entry), progress=entry.progress())

    async def preview(self, request: pb.PreviewEditRequest, timeout_s: float) -> Message:
        rank = self._rank
        entry = rank.edits.get(request.edit_id)
        async with asyncio.timeout(timeout_s):
            found = await preview(rank, entry, timeout_s)
        header = messages.header(rank, found.step)
        return pb.PreviewEditResponse(header=header, before=found.before, after=found.after)

    async def drop(self, request: pb.DropEditRequest, _timeout_s: float) -> Message:
        self._rank.follow_control(request.generation)
        await self._rank.edits.drop(request.edit_id)
        return pb.DropEditResponse(header=messages.header(self._rank))

    def _header(self, entry: Entry) -> common_pb2.Header:
        if entry.phase is not Phase.APPLIED:
            return messages.header(self._rank)
        header = messages.header(self._rank, entry.step)
        header.edits = entry.edits
        return header


def _part(message: bytes) -> pb.StageEditRequest | Chunk:
    """A manifest, or a chunk of data that refers to the message's bytes, to be copied once."""
    try:
        request = None if message[:1] == _DATA_TAG else pb.StageEditRequest.FromString(message)
        if request is None or not request.HasField("manifest"):
            return parse_chunk(message)
    except DecodeError:
        raise UsageError("the request is no paramd.v1.StageEditRequest") from None
    if request.data:
        raise UsageError("data: the first message has the manifest alone; data follows it")
    return request
