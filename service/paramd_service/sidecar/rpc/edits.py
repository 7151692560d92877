"""Edit calls: staging, progress, preview and dropping.

An edit's data may also come from another rank's sidecar on this host that has it staged: it
hands over its edit memory, read-only; the bytes are copied into our own, verified there, and
must match the digests that it reports.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from paramd.errors import (
    ConflictError,
    DataLossError,
    NotFoundError,
    UnreachableError,
    UsageError,
    error_of_grpc,
)
from paramd.memory import handover
from paramd.memory.arena import is_mirror
from paramd.memory.edit_program import Record, parse_program
from paramd.mesh.peers.grpc import check_handover
from paramd.state_files import host_id, kernel_of
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import Chunk, parse_chunk
from paramd_service.sidecar.edits.entry import Entry, Phase
from paramd_service.sidecar.edits.memory import Range, Ranges
from paramd_service.sidecar.edits.receive import Fill, copy_of
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.rpc.auth import CALLER_TICKET, Call, CallTable
from paramd_service.sidecar.rpc.statistics import on_stats_thread
from paramd_service.sidecar.snapshots.store import Key

BLOCK_BYTES = 2 << 20
_ANSWER_S = 5.0
STANDING_S = 2.0
"""How long training put back stays held for a standing snapshot of where it is now."""


async def copy_from_peer(rank: RankSidecar, entry: Entry, peer_rank: int, ticket: str) -> None:
    """Copy an edit's missing data from the sidecar of `peer_rank`.

    Raises:
        UsageError: that rank is not on this host, or its data has another size.
        NotFoundError, ConflictError: the edit is not staged there.
        DataLossError: its digests do not match the copied bytes.
        UnreachableError: its sidecar does not answer.
    """
    if entry.phase is not Phase.STAGING:
        return
    path = _socket_of(rank, peer_rank)
    descriptor, answer = await asyncio.to_thread(_shared, path, ticket, entry.edit_id, peer_rank)
    try:
        begin, size_bytes = int(answer["begin"]), int(answer["size_bytes"])
        if size_bytes != entry.size_bytes:
            raise UsageError(
                f"copy_from_rank: rank {peer_rank} has {size_bytes:,} bytes of this edit, rank "
                f"{rank.config.rank} needs {entry.size_bytes:,}; the ranks hold different pieces"
            )
        while (offset := entry.staged_bytes) < size_bytes:
            size = min(BLOCK_BYTES, size_bytes - offset)
            await rank.edits.take(entry, [(offset, size, _reading(descriptor, begin + offset))])
    finally:
        os.close(descriptor)
    # The peer may have dropped the edit and reused its memory during the copy.
    if [digest.hex() for digest in entry.data_digests] != answer["data_digests"]:
        await rank.edits.drop(entry.edit_id)
        raise DataLossError(
            f"copy_from_rank: the data staged at rank {peer_rank} changed during the copy; "
            "stage it again"
        )


def share_message(entry: Entry) -> handover.Message:
    """The answer to a peer that asks for an edit's data.

    Raises:
        ConflictError: it is not staged, or an undo that has no data.
    """
    if entry.phase not in (Phase.STAGED, Phase.READY) or entry.body is None:
        raise ConflictError(
            f"edit {entry.edit_id} is {entry.phase.name}; only STAGED edits can be copied"
        )
    return {
        "op": "shared",
        "begin": entry.body.data_begin,
        "size_bytes": entry.size_bytes,
        "data_digests": [digest.hex() for digest in entry.data_digests],
    }


def _socket_of(rank: RankSidecar, peer_rank: int) -> Path:
    peers = {peer.rank: peer for peer in rank.ready_mesh().peers}
    peer, own = peers.get(peer_rank), peers.get(rank.config.rank)
    host = own.host_id if own is not None else host_id()
    if peer is None or peer_rank == rank.config.rank or not peer.socket_path:
        raise UsageError(f"copy_from_rank: {peer_rank} is not another rank of this mesh")
    if kernel_of(peer.host_id) != kernel_of(host):
        raise UsageError(f"copy_from_rank: rank {peer_rank} is on another host; send its data")
    return Path(peer.socket_path)


def _shared(path: Path, ticket: str, edit_id: str, peer_rank: int) -> tuple[int, handover.Message]:
    connection = handover.connect(path, timeout_s=_ANSWER_S)
    try:
        message = {"op": "share", "ticket": ticket, "rank": peer_rank, "edit_id": edit_id}
        handover.send(connection, message)
        answer, descriptors = handover.receive(connection)
    except (EOFError, OSError) as error:
        raise UnreachableError(f"the sidecar of rank {peer_rank} does not answer") from error
    finally:
        connection.close()
    try:
        if answer["op"] == "shared" and len(descriptors) == 1:
            check_handover(answer, ticket, peer_rank)
            return descriptors.pop(), answer
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    kind = error_of_grpc(str(answer.get("code"))) if answer["op"] == "error" else NotFoundError
    raise kind(f"rank {peer_rank}: {answer.get('message', answer['op'])}")


def _reading(descriptor: int, position: int) -> Fill:
    def fill(address: int, begin: int, size_bytes: int) -> None:
        target = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        done = 0
        while done < size_bytes:
            moved = os.preadv(descriptor, [target[done:]], position + begin + done)
            if not moved:
                raise DataLossError("copy_from_rank: the peer's memory is shorter than it claims")
            done += moved

    return fill


@dataclass(frozen=True, slots=True)
class Preview:
    """One pair of statistics per operation, in order, all of one step."""

    step: int
    before: list[pb.Stats]
    after: list[pb.Stats]


async def preview(rank: RankSidecar, entry: Entry, timeout_s: float) -> Preview:
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
            return Preview(rank.step, nothing, nothing)
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
    return Preview(step, before, after)


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
                    rank.check_plan(request.manifest.incarnation, request.manifest.layout_digest)
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
