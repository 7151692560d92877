"""Edit calls: staging, progress, preview and dropping."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence

from google.protobuf.message import DecodeError, Message

from paramd.errors import ConflictError, UsageError
from paramd.memory.arena import is_mirror
from paramd.memory.edit_program import Record, parse_program
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import Chunk, parse_chunk
from paramd_service.sidecar.edits.entry import Entry, Phase
from paramd_service.sidecar.edits.memory import Range, Ranges
from paramd_service.sidecar.edits.receive import copy_of
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.rpc.auth import Call, CallTable
from paramd_service.sidecar.rpc.statistics import on_stats_thread
from paramd_service.sidecar.snapshots.store import Key

STANDING_S = 2.0
"""How long training put back stays held for a standing snapshot of where it is now."""


async def preview(rank: RankSidecar, entry: Entry, timeout_s: float) -> pb.PreviewEditResponse:
    """Statistics of this rank's elements before and after an edit, per operation.

    Computed on a copy; holds a snapshot of the elements meanwhile.

    Raises:
        ConflictError: the edit is not STAGED, or was applied meanwhile; the arena is a mirror.
        ExhaustedError, AbortedError, TornError: from pinning.
        UsageError: a dtype has no statistics.
    """
    async with entry.lock:
        _check_staged(entry)
        await rank.edits.planned(entry)
        attached, edit = rank.attached, entry.edit
        assert attached is not None
        if is_mirror(attached.page.words):
            raise ConflictError(
                "previews need the current parameters, which stay in the trainer's own memory; "
                "summon them to compute what an edit would do, or apply and undo it"
            )
        assert edit is not None
        arena_bytes, memory = attached.request.arena_bytes, rank.edits.memory.buffer
        records = parse_program(memory, entry.program_begin, arena_bytes=arena_bytes)
        spans = tuple(Ranges(*((item.arena_begin, item.arena_end) for item in edit.items)))
        if not spans:
            nothing = [pb.Stats(min=float("inf"), max=float("-inf"))] * entry.op_count
            header = messages.header(rank, rank.step)
            return pb.PreviewEditResponse(header=header, before=nothing, after=nothing)
        key = Key(rank.incarnation, spans)
        lease = await rank.pins.pin(key, lease_s=timeout_s, timeout_s=timeout_s)
        store = rank.pins.store
        snapshot = store.hold(lease.snapshot)
        try:
            # The hold replaces the lease, which could end in the middle.
            store.release(lease.snapshot_id)
            ops = [(item.op, item.dtype) for item in edit.items]
            view, count = snapshot.view(), entry.op_count
            before, after = await on_stats_thread(
                rank, lambda stop: _reduce(view, spans, memory, records, ops, count, stop)
            )
            step = snapshot.step
        finally:
            store.drop(snapshot)
        # Applied meanwhile, the edit may be in the snapshot already.
        rank.edits.settle()
        _check_staged(entry)
    header = messages.header(rank, step)
    return pb.PreviewEditResponse(header=header, before=before, after=after)


def _reduce(
    snapshot: memoryview,
    spans: Sequence[Range],
    memory: memoryview,
    records: Sequence[Record],
    ops: Sequence[tuple[int, str]],
    op_count: int,
    stop: Sequence[bool],
) -> tuple[list[pb.Stats], list[pb.Stats]]:
    from paramd_service.sidecar.statistics import reduce, trial

    reduce.set_up()
    before, after = ([reduce.Reduced() for _ in range(op_count)] for _ in range(2))
    offsets: dict[int, int] = {}
    begin_bytes = 0
    for begin, end in spans:
        offsets[begin] = begin_bytes - begin
        begin_bytes += end - begin
    begins = sorted(offsets)
    for record, (op, dtype) in zip(records, ops, strict=True):
        if stop:
            return [], []  # cancelled: the result is unused
        shift = offsets[begins[bisect_right(begins, record.arena_begin) - 1]]
        trial.try_record(
            snapshot, record.arena_begin + shift, memory, record, dtype, before[op], after[op]
        )
    first, last = ([reduce.stats_message(one) for one in part] for part in (before, after))
    return first, last


def _check_staged(entry: Entry) -> None:
    if entry.phase is not Phase.STAGED:
        raise ConflictError(
            f"edit {entry.edit_id} is {entry.phase.name}; only STAGED edits can be previewed"
        )


_DATA_TAG = b"\x0a"
_FIRST = "the first message, and only the first, must have the manifest"


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    subject = _EditCalls(rank)
    return {
        "StageEdit": Call(requests=subject.stage, part=_part),
        "GetEdit": Call(unary=subject.get),
        "PreviewEdit": Call(unary=subject.preview, heavy=True),
        "DropEdit": Call(unary=subject.drop),
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
                    rank.check_plan(request.manifest.incarnation, request.manifest.layout_digest)
                    entry = await rank.edits.begin(request.manifest)
                    continue
                assert entry is not None
                fill = copy_of(request)
                await rank.edits.take(entry, [(request.offset_bytes, request.size_bytes, fill)])
        if entry is None:
            raise UsageError(f"manifest: the stream was empty; {_FIRST}")
        return pb.StageEditResponse(header=self._header(entry), progress=entry.progress())

    async def get(self, request: pb.GetEditRequest, timeout_s: float) -> Message:
        entry = self._rank.edits.get(request.edit_id)
        if entry.is_rollback and entry.phase is Phase.APPLIED:
            # The control plane lets training go on after this answer.
            await self._rank.stands(min(STANDING_S, timeout_s / 2))
        return pb.GetEditResponse(header=self._header(entry), progress=entry.progress())

    async def preview(self, request: pb.PreviewEditRequest, timeout_s: float) -> Message:
        rank = self._rank
        entry = rank.edits.get(request.edit_id)
        async with asyncio.timeout(timeout_s):
            return await preview(rank, entry, timeout_s)

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
    """A manifest, or a chunk of data that refers to the message's bytes, to save a copy."""
    try:
        request = None if message[:1] == _DATA_TAG else pb.StageEditRequest.FromString(message)
        if request is None or not request.HasField("manifest"):
            return parse_chunk(message)
    except DecodeError:
        raise UsageError("the request is not a paramd.v1.StageEditRequest") from None
    if request.data:
        raise UsageError("data: the first message has only the manifest; data follows it")
    return request
