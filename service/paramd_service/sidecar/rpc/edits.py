"""Edit calls: staging, progress, preview and dropping."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

from google.protobuf.message import DecodeError, Message

from paramd.errors import ConflictError, UsageError
from paramd.memory.arena import is_mirror
from paramd.memory.edit_program import Record, parse_program
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import Chunk, parse_chunk
from paramd_service.admission import check_parts
from paramd_service.sidecar.calls import Call, CallTable, whole_if_ordered
from paramd_service.sidecar.edits.entry import Entry, Phase
from paramd_service.sidecar.edits.receive import copy_of
from paramd_service.sidecar.ranges import Range, Ranges, place_in
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.snapshots.store import Key

STANDING_S = 2.0
"""How long training stays held after a rollback, for a standing snapshot of its new state."""


async def _preview(
    rank: RankSidecar, request: pb.PreviewEditRequest, timeout_s: float
) -> pb.PreviewEditResponse:
    """Statistics of this rank's elements before and after an edit, per operation, computed on a
    copy while a snapshot of the elements is held. Raises ConflictError: the edit is not STAGED, or
    was applied meanwhile; the arena is a mirror. ExhaustedError, AbortedError, TornError: from
    pinning. UsageError: a dtype has no statistics."""
    entry = rank.edits.get(request.edit_id)
    async with asyncio.timeout(timeout_s), entry.lock:
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
            # The hold replaces the lease, which could end meanwhile.
            store.release(lease.snapshot_id)
            ops = [(item.op, item.dtype) for item in edit.items]
            view, count = snapshot.view(), entry.op_count
            before, after = await rank.reduced(
                lambda stop: _reduce(view, spans, memory, records, ops, count, stop)
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
    place = place_in(spans)
    for record, (op, dtype) in zip(records, ops, strict=True):
        if stop:
            return [], []  # cancelled: the result is unused
        begin = place(record.arena_begin, 0)
        assert begin is not None
        trial.try_record(snapshot, begin, memory, record, dtype, before[op], after[op])
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
    return {
        "StageEdit": Call(requests=partial(_stage, rank), part=_part),
        "GetEdit": Call(unary=partial(_get, rank)),
        "PreviewEdit": Call(unary=partial(_preview, rank), heavy=True),
        "DropEdit": Call(unary=partial(_drop, rank)),
    }


async def _stage(
    rank: RankSidecar, requests: AsyncIterator[pb.StageEditRequest | Chunk], timeout_s: float
) -> Message:
    entry: Entry | None = None
    async with asyncio.timeout(timeout_s):
        async for request in requests:
            if isinstance(request, pb.StageEditRequest) != (entry is None):
                raise UsageError(f"manifest: {_FIRST}")
            if isinstance(request, pb.StageEditRequest):
                await whole_if_ordered(requests)
                rank.check_plan(request.manifest.incarnation, request.manifest.layout_digest)
                entry = await rank.edits.begin(request.manifest)
                continue
            assert entry is not None
            fill = copy_of(request)
            await rank.edits.take(entry, [(request.offset_bytes, request.size_bytes, fill)])
    if entry is None:
        raise UsageError(f"manifest: the stream was empty; {_FIRST}")
    return pb.StageEditResponse(header=_header(rank, entry), progress=entry.progress())


async def _get(rank: RankSidecar, request: pb.GetEditRequest, timeout_s: float) -> Message:
    entry = rank.edits.get(request.edit_id)
    if entry.is_rollback and entry.phase is Phase.APPLIED:
        # The control plane lets training continue after this answer.
        await rank.parts.kept_states().stands(min(STANDING_S, timeout_s / 2))
    return pb.GetEditResponse(header=_header(rank, entry), progress=entry.progress())


async def _drop(rank: RankSidecar, request: pb.DropEditRequest, _timeout_s: float) -> Message:
    rank.follow_control(request.generation)
    await rank.edits.drop(request.edit_id)
    return pb.DropEditResponse(header=messages.header(rank))


def _header(rank: RankSidecar, entry: Entry) -> common_pb2.Header:
    if entry.phase is not Phase.APPLIED:
        return messages.header(rank)
    header = messages.header(rank, entry.step)
    header.edits = entry.edits
    return header


def _part(message: bytes) -> pb.StageEditRequest | Chunk:
    """A manifest, or a chunk of data that refers to the message's bytes, to save a copy."""
    try:
        request = None
        if message[:1] != _DATA_TAG:
            check_parts(pb.StageEditRequest.DESCRIPTOR, message)
            request = pb.StageEditRequest.FromString(message)
        if request is None or not request.HasField("manifest"):
            return parse_chunk(message)
    except DecodeError:
        raise UsageError("the request is not a paramd.v1.StageEditRequest") from None
    if request.data:
        raise UsageError("data: the first message has only the manifest; data follows it")
    return request
