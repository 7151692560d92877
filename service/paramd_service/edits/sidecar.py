"""Edits of one rank: staging, progress, preview and dropping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from paramd.errors import ConflictError, ExhaustedError, UnreachableError, UsageError
from paramd.memory.arena import is_mirror
from paramd.memory.edit_program import Record, parse_program
from paramd.v1 import common_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import Chunk, parse_chunk
from paramd_service.admission import check_parts
from paramd_service.edits.entry import EditLimits, Entry, Phase
from paramd_service.edits.manager import Edits, Scope
from paramd_service.edits.memory import EditMemory
from paramd_service.edits.receive import Lent, copy_of
from paramd_service.sidecar.calls import EDITORS, Call, CallTable, check_role, whole_if_ordered
from paramd_service.sidecar.metrics import Row
from paramd_service.sidecar.owner import AttachedMemory, Ownership
from paramd_service.sidecar.parts import Op, Peer, SidecarHost, SidecarPart
from paramd_service.sidecar.ranges import Range, Ranges, place_in
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.snapshots.store import Key
from paramd_service.sidecar.uploads import Uploads

STANDING_S = 2.0
"""How long training stays held after a rollback, for a standing snapshot of its new state."""

PROGRAM_BYTES = 4 << 20

_DATA_TAG = b"\x0a"
_FIRST = "the first message, and only the first, must have the manifest"


class RankEdits(SidecarPart):
    """Stages edits, and has them made at agreed boundaries."""

    name = "edits"

    def __init__(self, host: SidecarHost) -> None:
        super().__init__(host)
        self._edits: Edits | None = None
        self._without: AttachedMemory | None = None
        """What has no memory for edits: a sidecar that comes back while memory is short."""
        self._refusal = ""
        """Why, when it was last asked for."""
        self._making = asyncio.Lock()

    def calls(self) -> CallTable:
        return {
            "StageEdit": Call(requests=self._stage, part=_part),
            "GetEdit": Call(unary=self._get),
            "PreviewEdit": Call(unary=self._preview, heavy=True),
            "DropEdit": Call(unary=self._drop),
        }

    def ops(self) -> Mapping[str, Op]:
        return {"lend": self._lend, "stage": self._stage_lent, "take": self._take_lent}

    async def attached(self, memory: AttachedMemory) -> None:
        async with self._making:
            await self._make(memory)

    async def _make(self, memory: AttachedMemory) -> None:
        edits = self._made(memory)
        try:
            await edits.start()
        except ExhaustedError as error:
            # Keep serving reads without edits.
            if self._without is None:
                self.host.log("no-edits", reason=str(error))
            self._without, self._refusal = memory, str(error)
            await edits.close()
            return
        self._edits, self._without, self._refusal = edits, None, ""
        if self.host.has_pins:
            self.host.pins.boundaries.change_with(edits)

    async def _ready(self) -> Edits:
        """Edits of the attached trainer, whose memory is asked for again if it was refused. Raises
        as `_current`."""
        if self._without is not None:
            async with self._making:
                # Another request may have got it meanwhile, or the trainer may be gone.
                if self._without is not None:
                    await self._make(self._without)
                    if self._edits is not None:
                        self.host.log("edits-again")
        return self._current

    def trainer_ended(self, how: Ownership) -> None:
        self._without = None
        if self._edits is not None:
            self._edits.trainer_ended(how)

    async def released(self) -> None:
        self._without = None
        # Whoever asks for its memory at the moment still uses the map.
        async with self._making:
            edits, self._edits, self._refusal = self._edits, None, ""
            if edits is not None:
                await edits.close()

    def uploads(self) -> Uploads:
        return self._current

    def report(self, state: common_pb2.RankState) -> None:
        if self._edits is not None:
            state.edit_bytes = self._edits.staged_bytes + self._edits.undo_bytes

    def samples(self) -> list[Row]:
        applied = staged_bytes = undo_bytes = 0
        if self._edits is not None:
            applied, staged_bytes = self._edits.applied_count, self._edits.staged_bytes
            undo_bytes = self._edits.undo_bytes
        return [
            ("edits_applied_total", "Edits that this process saw applied", applied),
            ("edit_staged_bytes", "Memory of edits that are not applied", staged_bytes),
            ("edit_undo_bytes", "Memory kept to undo applied edits", undo_bytes),
        ]

    def idle_bytes(self) -> int:
        return self._edits.memory.idle_bytes if self._edits is not None else 0

    def take_idle(self) -> list[Callable[[], object]]:
        return self._edits.memory.take_idle() if self._edits is not None else []

    @property
    def _current(self) -> Edits:
        """Edits of the attached trainer. Raises UnreachableError if none has attached yet, or edit
        memory could not be allocated."""
        if self._refusal and self._edits is None:
            raise UnreachableError(
                f"this rank has no memory for edits: {self._refusal}. Free memory on its host and "
                "edit again: it is asked for at each edit"
            )
        if self._edits is None:
            reason = "edits have no memory here"
            if not self.host.has_pins:
                reason = self.host.ownership.value
            raise UnreachableError(f"{reason}; try again when training runs")
        return self._edits

    def _made(self, memory: AttachedMemory) -> Edits:
        host, config, arena_bytes = self.host, self.host.config, memory.request.arena_bytes
        edit_memory = EditMemory(
            memory.shared.edits,
            # No edit needs more than the whole arena plus its programs.
            pool_bytes=min(config.edit_pool_bytes, arena_bytes + PROGRAM_BYTES),
            idle_s=config.idle_memory_s,
            executor=host.executor,
            room=host.room,
        )
        budget = config.edit_budget_bytes
        scope = Scope(
            page=memory.page,
            rank=config.rank,
            arena_bytes=arena_bytes,
            limits=EditLimits(
                budget_bytes=budget if budget is not None else 3 * arena_bytes + (64 << 20),
                undo_budget_bytes=config.undo_budget_bytes,
                expiry_s=config.edit_expiry_s,
            ),
            layout=lambda: host.ready_mesh().layout,
            kept_states=host.parts.kept_states,
        )
        return Edits(edit_memory, scope, host.faults)

    # Memory that a client on this host lends

    async def _lend(self, peer: Peer, message: dict[str, Any], descriptors: list[int]) -> None:
        check_role(peer.caller(message), EDITORS)
        peer.answer(peer.kept(Lent).lend(descriptors) | self.host.identity())

    async def _stage_lent(
        self, peer: Peer, message: dict[str, Any], _descriptors: list[int]
    ) -> None:
        claims = peer.caller(message)
        check_role(claims, EDITORS)
        edit_id = str(message.get("edit_id", ""))
        entry = await (await self._ready()).opened(edit_id, claims.token_id)
        peer.answer(peer.kept(Lent).stage(entry) | self.host.identity())

    async def _take_lent(
        self, peer: Peer, message: dict[str, Any], _descriptors: list[int]
    ) -> None:
        lent = peer.kept(Lent)
        # Its thread may read the socket, since the reader here is off while a message is served.
        await self._current.take(lent.entry, lent.arriving(peer.sock, message))
        peer.answer(lent.taken())

    # Calls

    async def _stage(
        self, requests: AsyncIterator[pb.StageEditRequest | Chunk], timeout_s: float
    ) -> Message:
        entry: Entry | None = None
        async with asyncio.timeout(timeout_s):
            async for request in requests:
                if isinstance(request, pb.StageEditRequest) != (entry is None):
                    raise UsageError(f"manifest: {_FIRST}")
                if isinstance(request, pb.StageEditRequest):
                    await whole_if_ordered(requests)
                    self.host.check_plan(
                        request.manifest.incarnation, request.manifest.layout_digest
                    )
                    entry = await (await self._ready()).begin(request.manifest)
                    continue
                assert entry is not None
                fill = copy_of(request)
                await self._current.take(entry, [(request.offset_bytes, request.size_bytes, fill)])
        if entry is None:
            raise UsageError(f"manifest: the stream was empty; {_FIRST}")
        return pb.StageEditResponse(header=self._header(entry), progress=entry.progress())

    async def _get(self, request: pb.GetEditRequest, timeout_s: float) -> Message:
        entry = (await self._ready()).get(request.edit_id)
        if entry.is_rollback and entry.phase is Phase.APPLIED:
            # The control plane lets training continue after this answer.
            await self.host.parts.kept_states().stands(min(STANDING_S, timeout_s / 2))
        return pb.GetEditResponse(header=self._header(entry), progress=entry.progress())

    async def _drop(self, request: pb.DropEditRequest, _timeout_s: float) -> Message:
        self.host.follow_control(request.generation)
        await self._current.drop(request.edit_id)
        return pb.DropEditResponse(header=messages.header(self.host))

    def _header(self, entry: Entry) -> common_pb2.Header:
        if entry.phase is not Phase.APPLIED:
            return messages.header(self.host)
        header = messages.header(self.host, entry.step)
        header.edits = entry.edits
        return header

    async def _preview(
        self, request: pb.PreviewEditRequest, timeout_s: float
    ) -> pb.PreviewEditResponse:
        """Statistics of this rank's elements before and after an edit, for each operation.

        Computed on a copy, while a snapshot of the elements is held. Raises ConflictError: the edit
        is not STAGED, or was applied meanwhile; the arena is a mirror. ExhaustedError,
        AbortedError, TornError: from pinning. UsageError: a dtype has no statistics.
        """
        entry = self._current.get(request.edit_id)
        async with asyncio.timeout(timeout_s), entry.lock:
            _check_staged(entry)
            trial = await self._trial(entry)
            if not trial.spans:
                nothing = [pb.Stats(min=float("inf"), max=float("-inf"))] * entry.op_count
                header = messages.header(self.host, self.host.step)
                return pb.PreviewEditResponse(header=header, before=nothing, after=nothing)
            answer = await self._tried(trial, timeout_s)
            # Applied meanwhile, the edit may be in the snapshot already.
            self._current.settle()
            _check_staged(entry)
        return answer

    async def _trial(self, entry: Entry) -> _Trial:
        """What is needed to try an edit. Raises ConflictError: the arena is a mirror."""
        await self._current.planned(entry)
        attached, edit = self.host.attached, entry.edit
        assert attached is not None
        if is_mirror(attached.page.words):
            raise ConflictError(
                "previews need the current parameters, which stay in the trainer's own memory; "
                "summon them to compute what an edit would do, or apply and undo it"
            )
        assert edit is not None
        arena_bytes, memory = attached.request.arena_bytes, self._current.memory.buffer
        return _Trial(
            spans=tuple(Ranges(*((item.arena_begin, item.arena_end) for item in edit.items))),
            memory=memory,
            records=parse_program(memory, entry.program_begin, arena_bytes=arena_bytes),
            ops=[(item.op, item.dtype) for item in edit.items],
            op_count=entry.op_count,
        )

    async def _tried(self, trial: _Trial, timeout_s: float) -> pb.PreviewEditResponse:
        """Try an edit on a snapshot of the elements that it changes."""
        pins, key = self.host.pins, Key(self.host.incarnation, trial.spans)
        lease = await pins.pin(key, lease_s=timeout_s, timeout_s=timeout_s)
        snapshot = pins.store.hold(lease.snapshot)
        try:
            # The hold replaces the lease, which could end meanwhile.
            pins.store.release(lease.snapshot_id)
            view = snapshot.view()
            before, after = await self.host.reduced(lambda stop: _reduce(view, trial, stop))
            step = snapshot.step
        finally:
            pins.store.drop(snapshot)
        header = messages.header(self.host, step)
        return pb.PreviewEditResponse(header=header, before=before, after=after)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """An edit of this rank, to be tried on a copy."""

    spans: tuple[Range, ...]
    """The arena bytes that it changes."""
    memory: memoryview
    """Edit memory, which has the program and its data."""
    records: Sequence[Record]
    ops: Sequence[tuple[int, str]]
    """By record, the number of its operation and the dtype of its elements."""
    op_count: int


def _reduce(
    snapshot: memoryview, trial: _Trial, stop: Sequence[bool]
) -> tuple[list[pb.Stats], list[pb.Stats]]:
    """Statistics before and after each operation; unused once `stop` is not empty."""
    from paramd_service.sidecar.statistics import reduce
    from paramd_service.sidecar.statistics.trial import try_record

    reduce.set_up()
    before, after = ([reduce.Reduced() for _ in range(trial.op_count)] for _ in range(2))
    place = place_in(trial.spans)
    for record, (op, dtype) in zip(trial.records, trial.ops, strict=True):
        if stop:
            return [], []  # cancelled: the result is unused
        begin = place(record.arena_begin, 0)
        assert begin is not None
        try_record(snapshot, begin, trial.memory, record, dtype, before[op], after[op])
    return list(map(reduce.stats_message, before)), list(map(reduce.stats_message, after))


def _check_staged(entry: Entry) -> None:
    if entry.phase is not Phase.STAGED:
        raise ConflictError(
            f"edit {entry.edit_id} is {entry.phase.name}; only STAGED edits can be previewed"
        )


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
