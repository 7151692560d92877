"""Edits of one attachment: staged, made ready, applied, undone; see entry.Phase.

Only the trainer applies; this side never touches the arena. The fate of a ready edit is read
from the page alone (EDIT_APPLIED, EDIT_TOKEN), so a respawned sidecar reports the same. Runs on
the event loop; data is copied and checked, and programs are written, on threads.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from paramd.errors import ConflictError, ExhaustedError, ExistsError, NotFoundError, UsageError
from paramd.layout.codec import decode_layout
from paramd.layout.edits.ops import manifest_digest
from paramd.layout.edits.plan import PlannedOp, RankEdit, check_ops, rank_edits
from paramd.layout.types import TensorLayout
from paramd.memory.control_page import ControlPage, Word, Words
from paramd.memory.edit_program import ANY_STEP, note_of, read_answer, write_program
from paramd.v1 import layout_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.admission import CALLER, Who
from paramd_service.aio import in_executor, kept, stopped
from paramd_service.edits import notes
from paramd_service.edits.entry import (
    WITHDRAWN_NS,
    EditLimits,
    Entry,
    Outcome,
    Phase,
    UndoRefusal,
    body_at,
    fate,
    records_of,
    write_undo,
)
from paramd_service.edits.memory import EditMemory
from paramd_service.edits.receive import DataRange, Intake, NonfiniteError
from paramd_service.edits.table import EditBook, UndoBook
from paramd_service.sidecar.boundaries import BoundaryChanges
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.kept_states import KeptStates
from paramd_service.sidecar.owner import Ownership
from paramd_service.sidecar.ranges import Range
from paramd_service.sidecar.uploads import Part, Upload, Uploads

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """The attachment that edits belong to."""

    page: ControlPage
    rank: int
    arena_bytes: int
    limits: EditLimits
    layout: Callable[[], bytes]
    """Returns the serialized layout; raises UnreachableError while there is none."""
    kept_states: Callable[[], KeptStates]
    """The states that a rollback can return to."""


class RankLayout:
    """One rank's layout as serialized tensors: as objects, 100,000 tensors would take 100 MB."""

    def __init__(self, serialized: bytes, rank: int) -> None:
        """Slow for large layouts: call it off the event loop."""
        self._tensors: dict[str, bytes] = {}
        for tensor in layout_pb2.Layout.FromString(serialized).tensors:
            own = [piece for piece in tensor.pieces if piece.rank == rank]
            del tensor.pieces[:]
            tensor.pieces.extend(own)
            data = tensor.SerializeToString()
            for name in (tensor.fqn, *tensor.aliases):
                self._tensors[name] = data

    def find(self, name: str) -> TensorLayout | None:
        data = self._tensors.get(name)
        if data is None:
            return None
        tensor = layout_pb2.Tensor.FromString(data)
        return decode_layout(layout_pb2.Layout(tensors=[tensor])).tensors[0]


class Opener:
    """Opens the edits of one attachment."""

    def __init__(self, memory: EditMemory, undo: UndoBook, scope: Scope) -> None:
        self._memory = memory
        self._undo = undo
        self._scope = scope
        self._layout: RankLayout | None = None
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="paramd-edits")

    async def on_thread(self, work: Callable[[], Answer]) -> Answer:
        """Run work that touches the memory; cancellation waits for its end."""
        return await in_executor(self._threads, work)

    async def close(self) -> None:
        """Stop the threads."""
        await self._loop.run_in_executor(None, self._threads.shutdown)

    async def plan(self, entry: Entry) -> None:
        """Set `ops` and `edit`.

        Raises:
            UsageError, NotFoundError: If they do not fit the layout.
        """
        if entry.edit is not None:
            return
        if notes.has_note(entry.manifest):
            entry.edit = RankEdit(rank=self._scope.rank, items=(), data_bytes=0)
            return
        serialized, manifest = self._scope.layout(), entry.manifest

        def plan() -> tuple[PlannedOp, ...]:
            if self._layout is None:
                self._layout = RankLayout(serialized, self._scope.rank)
            find, allow_nonfinite = self._layout.find, manifest.allow_nonfinite
            return check_ops(find, manifest.ops, allow_nonfinite=allow_nonfinite)

        entry.ops = await self.on_thread(plan)
        (entry.edit,) = rank_edits(entry.ops, [self._scope.rank])

    async def open_new(self, entry: Entry, check_bytes: Callable[[Entry, int], None]) -> None:
        """Reserve memory for an edit and write its program.

        Args:
            entry: The edit, which gets its program, its memory and what takes its data.
            check_bytes: Enforces the budget, given the edit and its size in bytes.

        Raises:
            UsageError, NotFoundError: The edit does not fit the layout.
            ExhaustedError: No room.
        """
        manifest = entry.manifest
        if_step = manifest.if_step if manifest.HasField("if_step") else ANY_STEP
        if if_step < ANY_STEP:
            raise UsageError(f"if_step: {if_step}; expected 0 or more")
        await self.plan(entry)
        edit, ops = entry.edit, entry.ops
        assert edit is not None
        entry.op_count = len(ops)
        undoable = self._is_undoable(entry, edit)
        size_bytes = body_at(0, edit, ops=ops, undoable=undoable).size_bytes
        check_bytes(entry, size_bytes)
        begin, end = await self.reserve(size_bytes)
        entry.body = body = replace(body_at(begin, edit, ops=ops, undoable=undoable), end=end)
        entry.program_begin, entry.size_bytes = body.programs[0], edit.data_bytes
        buffer = self._memory.buffer
        records = records_of(
            edit, body, ops=ops, undoable=undoable, reset_moments=manifest.reset_moments
        )
        write = partial(write_program, buffer, entry.program_begin, records, if_step=if_step)
        await self.on_thread(write)
        entry.intake = Intake(
            buffer[body.data_begin : body.data_begin + edit.data_bytes],
            self._memory.sparse.address + body.data_begin,
            _data_ranges(edit, ops),
            op_count=len(ops),
            allow_nonfinite=manifest.allow_nonfinite,
        )

    def _is_undoable(self, entry: Entry, edit: RankEdit) -> bool:
        """Whether an edit keeps what undoes it; where that is too large, it notes the refusal."""
        if not entry.manifest.undoable:
            return False
        whole_bytes = body_at(0, edit, ops=entry.ops, undoable=True).size_bytes
        if whole_bytes > self._scope.limits.undo_budget_bytes:
            entry.refusal = UndoRefusal.TOO_LARGE
            return False
        return True

    async def open_note(self, entry: Entry) -> None:
        """Open an edit that changes no elements by itself; see notes.py."""
        manifest = entry.manifest
        notes.check(manifest, self._scope.page)
        await self.plan(entry)
        if entry.is_rollback:
            await self._open_rollback(entry)
        else:
            body = notes.change_body()
            entry.body = body = notes.placed(body, *await self.reserve(body.size_bytes))
            notes.write_change(self._memory.buffer, body, manifest)
        entry.program_begin = entry.body.programs[0] if entry.body is not None else 0
        entry.intake = Intake(memoryview(b""), 0, [], op_count=0, allow_nonfinite=True)

    async def _open_rollback(self, entry: Entry) -> None:
        wanted, kept = entry.manifest.rollback, self._scope.kept_states()
        with kept.found(wanted.mark, wanted.step, wanted.lineage, wanted.edits) as found:
            sizes = notes.StateSizes.of(found.label, self._scope.page, kept.beside_bytes())
            body = notes.rollback_body(sizes)
            entry.body = body = notes.placed(body, *await self.reserve(body.size_bytes))
            await self.on_thread(
                partial(notes.write_rollback, self._memory.buffer, body, found, sizes)
            )

    async def open_undo(self, entry: Entry, original: Entry) -> None:
        """Write the program that undoes `original` next to the applied one."""
        manifest = entry.manifest
        if notes.has_note(manifest):
            notes.check(manifest, self._scope.page)
        body = self._undo.claim(original, entry)
        if what_of(manifest) != what_of(original.manifest):
            raise UsageError(
                f"ops: an undo must have the ops of the edit it undoes, {manifest.undo_of}"
            )
        entry.op_count, entry.body = len(manifest.ops), body
        first, second = body.programs
        entry.program_begin = second if original.program_begin == first else first
        entry.intake = Intake(
            memoryview(b""), 0, [], op_count=entry.op_count, allow_nonfinite=False
        )

        def write() -> None:
            write_undo(
                self._memory.buffer,
                original.program_begin,
                entry.program_begin,
                arena_bytes=self._scope.arena_bytes,
                reset_moments=manifest.reset_moments,
            )

        await self.on_thread(write)

    async def reserve(self, size_bytes: int) -> Range:
        """Reserve memory, dropping undo data if needed. Raises ExhaustedError."""
        while True:
            try:
                return await self._memory.reserve(size_bytes)
            except ExhaustedError:
                if not self._undo.drop_oldest():
                    raise


def what_of(manifest: pb.EditManifest) -> tuple[object, ...]:
    """The contents of an edit, which its undo shares."""
    return list(manifest.ops), manifest.hyperparameters, manifest.rollback


def _data_ranges(edit: RankEdit, ops: Sequence[PlannedOp]) -> list[DataRange]:
    return [
        DataRange(
            item.op,
            item.data_begin,
            item.data_begin + item.size_bytes,
            item.dtype,
            ops[item.op].tensor.fqn,
        )
        for item in edit.items
        if item.data_begin >= 0
    ]


EXPECTED_NS = 1_000_000_000
"""How long a boundary request is expected after an edit's data has arrived."""

_ID = re.compile(r"[0-9a-f]{32}")
_SWEEP_S = 5.0


def expect_request(words: Words) -> None:
    """Have the trainers run rounds more often, as a request will come soon."""
    words[Word.EXPECTED_NS] = time.monotonic_ns() + EXPECTED_NS


class Edits(BoundaryChanges, Uploads):
    """The edits of one rank in one incarnation."""

    def __init__(self, memory: EditMemory, scope: Scope, faults: Faults) -> None:
        self.memory = memory
        self.applied_count = 0
        """Edits that this process saw applied."""
        self._page = scope.page
        self._limits = scope.limits
        self._sweep_s = min(_SWEEP_S, scope.limits.expiry_s)
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._book = EditBook(memory, scope.limits)
        self._opener = Opener(memory, self._book.undo, scope)
        self._ended: Ownership | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        memory.on_hole = self._count_hole

    async def start(self) -> None:
        """Recover the edits that an earlier sidecar left. Raises ExhaustedError."""
        await self.memory.start()
        self._book.open()
        self.settle()
        kept(self._tasks, self.memory.warm_up())
        self._timer = self._loop.call_later(self._sweep_s, self._timed)

    async def begin(self, manifest: pb.EditManifest) -> Entry:
        """Open the edit of a manifest and reserve its memory. Idempotent by id and manifest.

        Raises:
            ExistsError: The id has another manifest.
            DeniedError: Another token stages it.
            UsageError, NotFoundError: The edit does not fit the layout.
            ExhaustedError: No room.
            ConflictError: It cannot undo what it names.
        """
        if _ID.fullmatch(manifest.edit_id) is None:
            raise UsageError(f"edit_id: {manifest.edit_id[:64]!r}; expected 32 hexadecimal digits")
        digest = manifest_digest(manifest)
        entry = self._book.entries.get(manifest.edit_id)
        if entry is None:
            if self._ended is not None:
                raise ConflictError(f"no further edits: {self._ended.value}")
            self._book.check_room()
            entry = Entry(
                manifest=manifest,
                digest=digest,
                opened=self._loop.create_future(),
                refusal=UndoRefusal.NONE if manifest.undoable else UndoRefusal.NOT_ASKED,
                touched_ns=time.monotonic_ns(),
                who=CALLER.get(),
            )
            self._book.entries[entry.edit_id] = entry
            expect_request(self._page.words)
            kept(self._tasks, self._open(entry))
        elif entry.digest != digest:
            raise ExistsError(
                f"edit {manifest.edit_id} exists here with another content; ids are never reused, "
                "choose a new one"
            )
        # Shielded: other callers may wait for the same edit.
        await asyncio.shield(entry.opened)
        entry.check_author(CALLER.get())
        entry.touched_ns = time.monotonic_ns()
        if entry.phase is Phase.STAGING:
            # All data may have arrived while there was no memory for manifest and digests.
            async with entry.lock:
                await self._complete(entry)
        self.settle()
        return entry

    async def take(self, entry: Entry, parts: Iterable[Part]) -> None:
        """Take parts of the data in order, on a thread; the last one makes the edit STAGED.

        Raises:
            UsageError: A part leaves a gap, or is not finite (which forgets the edit).
            DataLossError: Raised by a part's `fill`.
        """
        async with entry.lock:
            expect_request(self._page.words)
            entry.touched_ns = time.monotonic_ns()
            # It may have been dropped or expired while this waited for the lock.
            if self._book.entries.get(entry.edit_id) is not entry:
                raise NotFoundError(f"edit {entry.edit_id} was dropped while its data was arriving")
            intake = entry.intake
            if intake is None:
                return
            try:
                await self._opener.on_thread(partial(intake.take_all, parts))
            except NonfiniteError:
                self._book.forget(entry)
                raise
            self._faults.at("edit-staging")
            await self._complete(entry)

    def upload(self, upload_id: str) -> Entry:
        return self.get(upload_id)

    async def take_parts(self, upload: Upload, parts: Iterable[Part]) -> None:
        assert isinstance(upload, Entry)
        await self.take(upload, parts)

    def get(self, edit_id: str) -> Entry:
        """The edit as it is now. Raises NotFoundError."""
        self.settle()
        entry = self._book.entries.get(edit_id)
        if entry is None:
            raise NotFoundError(
                f"edit {edit_id[:64]!r} is unknown on this rank; it was never staged here, or it "
                "expired"
            )
        return entry

    async def opened(self, upload_id: str, who: Who) -> Entry:
        """The edit that its author stages, once it is open. Raises NotFoundError, DeniedError."""
        entry = self.get(upload_id)
        # Shielded: other callers may wait for the same edit.
        await asyncio.shield(entry.opened)
        entry.check_author(who)
        return entry

    async def planned(self, entry: Entry) -> Entry:
        """The edit with `ops` and `edit` set, even if an earlier sidecar staged it."""
        await self._opener.plan(entry)
        return entry

    async def drop(self, edit_id: str) -> None:
        """Forget a staged edit, or free the undo data of an applied one. Idempotent.

        Raises:
            ConflictError: The trainers may have agreed on it, or an undo of it is staged.
        """
        self.settle()
        entry = self._book.entries.get(edit_id)
        if entry is None:
            return
        async with entry.lock:
            if self._book.entries.get(edit_id) is not entry:
                return
            self.settle()
            if entry.unready_ns:
                # Its request has left the page: once PROMISED = 0 is final, `settle` decides.
                await asyncio.sleep(WITHDRAWN_NS / 1e9)
                self.settle()
            if entry.phase is Phase.READY:
                raise ConflictError(
                    f"edit {edit_id}: the trainers may have agreed on it; drop it again when "
                    f"boundary {entry.boundary} has ended"
                )
            if entry.phase is Phase.APPLIED:
                self._book.drop_undo(entry)
            else:
                self._book.forget(entry)

    def make_ready(self, name: str, *, boundary: int, token: int) -> int:
        """Declare a staged edit ready for a boundary request, before READY is written.

        Idempotent for the same request. The edit's memory is kept until `request_ended` and the
        page show that it can no longer be applied.

        Returns: Word.ARGUMENT: offset of its program in the edits' memory.

        Raises:
            NotFoundError: The edit is unknown.
            ConflictError: It is incomplete, already applied, or in doubt for another request.
        """
        entry = self.get(name)
        if entry.phase in (Phase.READY, Phase.APPLIED):
            if (entry.boundary, entry.token) == (boundary, token):
                entry.requested = entry.phase is Phase.READY
                return entry.program_begin
            raise ConflictError(
                f"edit {name} was already applied, at boundary {entry.boundary}"
                if entry.phase is Phase.APPLIED
                else f"edit {name} is in doubt for boundary {entry.boundary}; withdraw that "
                "boundary, and retry when its round has ended"
            )
        if entry.phase is Phase.STAGING:
            raise ConflictError(
                f"edit {name} is not complete on this rank: {entry.staged_bytes:,} "
                f"of {entry.size_bytes:,} bytes are staged"
            )
        entry.boundary, entry.token, entry.unready_ns = boundary, token, 0
        # The copying thread, which writes READY, may be slow: until it has ended the request,
        # READY may still appear.
        entry.phase, entry.requested = Phase.READY, True
        # Before READY is in the page: a respawned sidecar must know that it may be applied.
        self._book.persist(entry)
        self._faults.at("edit-ready")
        return entry.program_begin

    def settle(self) -> None:
        """Settle ready edits that, by the page, were applied or can no longer be applied."""
        for entry in [one for one in self._book.entries.values() if one.phase is Phase.READY]:
            found = fate(entry, self._page.words, ended=self._ended, now_ns=time.monotonic_ns())
            if found is Outcome.APPLIED:
                self._applied(entry)
            elif found is Outcome.NEVER:
                self._book.unready(entry)

    def request_ended(self, boundary: int) -> None:
        """Note that the copying thread will never write this request to the page again."""
        for entry in self._book.entries.values():
            if entry.boundary == boundary:
                entry.requested = False
        self.settle()

    def withdrawn(self, boundary: int) -> None:
        """Free a request's edit at once: this rank will certainly never take part in it."""
        self.settle()
        for entry in self._book.entries.values():
            if entry.phase is Phase.READY and entry.boundary == boundary:
                self._book.unready(entry)

    def trainer_ended(self, ownership: Ownership) -> None:
        """Note that no more edits will be applied; applied ones are still reported."""
        self._ended = ownership
        self.settle()

    async def close(self) -> None:
        """Release everything held here; the memory remains the trainer's."""
        if self._timer is not None:
            self._timer.cancel()
        await stopped(*self._tasks)
        await self._opener.close()
        self._book.close()
        await self.memory.close()

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory taken by edits that are not applied."""
        return self._book.staged_bytes

    @property
    def undo_bytes(self) -> int:
        return self._book.undo.kept_bytes

    async def _open(self, entry: Entry) -> None:
        try:
            async with entry.lock:
                if entry.manifest.undo_of:
                    await self._opener.open_undo(entry, self.get(entry.manifest.undo_of))
                elif notes.has_note(entry.manifest):
                    self._book.check_rollback(entry)
                    await self._opener.open_note(entry)
                else:
                    await self._opener.open_new(entry, self._book.check_bytes)
                self._faults.at("edit-staging")
                await self._complete(entry)
            entry.opened.set_result(None)
        except BaseException as error:
            self._book.forget(entry)
            entry.opened.set_exception(error)
            entry.opened.exception()  # retrieved, or asyncio logs it if no caller is left
            if not isinstance(error, Exception):
                raise

    async def _complete(self, entry: Entry) -> None:
        """Make the edit STAGED once all its data has arrived."""
        intake = entry.intake
        if intake is None or intake.staged_bytes < intake.size_bytes:
            return
        entry.data_digests = intake.digests()
        meta = entry.meta_bytes()
        entry.meta = await self._opener.reserve(len(meta))
        self.memory.buffer[entry.meta[0] : entry.meta[0] + len(meta)] = meta
        entry.intake = None
        entry.phase = Phase.STAGED
        # Last: a respawned sidecar finds only edits with complete data, manifest and digests.
        self._book.in_order(entry)
        self._faults.at("edit-staged")

    def _applied(self, entry: Entry) -> None:
        self._faults.at("edit-applied")
        page = self._page
        entry.step, entry.edits = page[Word.EDIT_STEP], page[Word.EDITS]
        entry.stop_ns = page[Word.EDIT_NS]
        entry.told = self._told(entry)
        entry.phase = Phase.APPLIED
        self.applied_count += 1
        self._book.applied(entry)

    def why_refused(self, name: str) -> str:
        """The trainer's message when it refused an edit that has a note; else empty."""
        entry = self._book.entries.get(name)
        return self._told(entry) if entry is not None else ""

    def _told(self, entry: Entry) -> str:
        if not notes.has_note(entry.manifest) or not entry.program_begin:
            return ""
        return read_answer(self.memory.buffer, note_of(self.memory.buffer, entry.program_begin))

    def sweep(self) -> None:
        """Forget staged edits that have been untouched for too long."""
        self.settle()
        before_ns = time.monotonic_ns() - int(self._limits.expiry_s * 1e9)
        for entry in list(self._book.entries.values()):
            idle = entry.phase in (Phase.STAGING, Phase.STAGED) and entry.touched_ns < before_ns
            if idle and not entry.lock.locked():
                self._book.forget(entry)

    def _count_hole(self) -> None:
        # Pages of edits are released: the trainer's page tables for them become stale.
        self._page[Word.EDIT_HOLES] += 1

    def _timed(self) -> None:
        self._timer = self._loop.call_later(self._sweep_s, self._timed)
        self.sweep()
