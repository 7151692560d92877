"""One edit on one rank: its state and fate, its body in the edits' memory, its index entry.

    [program][program of its undo][data][pre-images]        all at multiples of 64 bytes

An undo has no body: it writes its program into the spare program space of the body that it undoes,
and takes over that body with its pre-images. So undoing needs no memory, and an undo can itself be
undone.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from paramd.errors import DeniedError
from paramd.layout.dtypes import item_bytes
from paramd.layout.edits.kinds import EditKind, numbers_of
from paramd.layout.edits.ops import manifest_digest
from paramd.layout.edits.plan import EditItem, PlannedOp, RankEdit
from paramd.memory.control_page import Word
from paramd.memory.edit_program import (
    DTYPE_CODES,
    NO_DATA,
    Record,
    note_of,
    parse_program,
    program_bytes,
    write_program,
)
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.admission import Who
from paramd_service.edits.memory import Slot, id_words
from paramd_service.edits.receive import Intake
from paramd_service.sidecar.owner import Ownership
from paramd_service.sidecar.ranges import Range

_ALIGNMENT = 64

_AS_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Integer dtypes of the same size, for dtypes that programs lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Byte offsets into the edits' memory. Absent parts: begin == end."""

    begin: int
    end: int
    programs: tuple[int, int]
    """First bytes of the two programs; equal if there is no room for an undo."""
    data_begin: int
    preimage_begin: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


def body_at(begin: int, edit: RankEdit, *, ops: Sequence[PlannedOp], undoable: bool) -> Body:
    """Lay out an edit's body at `begin`, a multiple of the page size."""
    body = body_of(begin, begin, record_count=len(edit.items), undoable=undoable)
    preimage_begin = body.data_begin + _aligned(edit.data_bytes)
    kept = sum(_aligned(item.size_bytes) for item in edit.items if _keeps(item, ops))
    end = preimage_begin + (kept if undoable else 0)
    return replace(body, preimage_begin=preimage_begin, end=end)


def body_of(begin: int, end: int, *, record_count: int, undoable: bool) -> Body:
    """A body laid out by an earlier sidecar; only the parts that undo and preview need."""
    room = _aligned(program_bytes(record_count))
    return Body(
        begin=begin,
        end=end,
        programs=(begin, begin + room if undoable else begin),
        data_begin=begin + room * (2 if undoable else 1),
        preimage_begin=end,
    )


def records_of(
    edit: RankEdit, body: Body, *, ops: Sequence[PlannedOp], undoable: bool, reset_moments: bool
) -> Iterator[Record]:
    preimage = body.preimage_begin
    for item in edit.items:
        op = ops[item.op].op
        kind = EditKind(op.kind)
        data_begin = body.data_begin + item.data_begin if item.data_begin >= 0 else NO_DATA
        keep = NO_DATA
        if undoable and kind is EditKind.SET:
            keep = data_begin
        elif undoable and _keeps(item, ops):
            keep, preimage = preimage, preimage + _aligned(item.size_bytes)
        sizes, strides = _merged(item.sizes, item.strides)
        yield Record(
            op=kind,
            dtype=item.dtype if item.dtype in DTYPE_CODES else _AS_BITS[item_bytes(item.dtype)],
            arena_begin=item.arena_begin,
            sizes=sizes,
            strides=strides,
            data_begin=data_begin,
            preimage_begin=keep,
            reset_moments=reset_moments,
            **numbers_of(op),
        )


def write_undo(
    memory: memoryview, done: int, undo: int, *, arena_bytes: int, reset_moments: bool
) -> None:
    """Write at `undo` the program that undoes the applied one at `done`: additions are subtracted,
    everything else is swapped back.

    Raises:
        UsageError: If there is no program at `done`.
    """
    records = parse_program(memory, done, arena_bytes=arena_bytes)
    undoing = (_undoing(one, reset_moments) for one in records)
    write_program(memory, undo, undoing, note=note_of(memory, done))


def _undoing(record: Record, reset_moments: bool) -> Record:
    if record.op is EditKind.ADD and record.preimage_begin == NO_DATA:
        return replace(record, weight=-record.weight, reset_moments=reset_moments)
    return replace(
        record,
        op=EditKind.SET,
        data_begin=record.preimage_begin,
        preimage_begin=record.preimage_begin,
        reset_moments=reset_moments,
    )


def _keeps(item: EditItem, ops: Sequence[PlannedOp]) -> bool:
    """Whether undoing an item needs a pre-image besides its data."""
    return EditKind(ops[item.op].op.kind) not in (EditKind.SET, EditKind.ADD)


def _merged(
    sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same elements in the same order with as few dims as possible."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(size for size, _ in merged), tuple(stride for _, stride in merged)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


_LENGTHS = struct.Struct("<2Q")
WITHDRAWN_NS = 20_000_000
"""How long a request must be gone from the page before PROMISED = 0 is final: twice the wait of a
withdrawal."""


@dataclass(frozen=True, kw_only=True)
class EditLimits:
    budget_bytes: int
    """Budget of all edits that are not applied together; above 0."""
    undo_budget_bytes: int
    """Budget of bytes kept to undo applied edits; 0 or more."""
    expiry_s: float
    """How long an untouched staged edit is kept; above 0."""
    max_edits: int = 256
    """Edits that may be staged at once; 1 or more."""


class Phase(IntEnum):
    """As paramd.v1.EditPhase.

    STAGING --all data verified---------> STAGED --make_ready--> READY --applied--> APPLIED
                                            ^------withdrawn-------/
    STAGING exists in this process only; the others are in the index and survive it.
    """

    STAGING = 1
    STAGED = 2
    READY = 3
    APPLIED = 4


class UndoRefusal(IntEnum):
    """Why an applied edit cannot be undone here."""

    NONE = 0
    NOT_ASKED = 1
    TOO_LARGE = 2
    CROWDED_OUT = 3
    UNDONE = 4
    DROPPED = 5


REFUSALS: dict[UndoRefusal, str] = {
    UndoRefusal.NONE: "",
    UndoRefusal.NOT_ASKED: "the edit was made without undo data",
    UndoRefusal.TOO_LARGE: "its undo data exceeds this rank's whole undo budget",
    UndoRefusal.CROWDED_OUT: "its undo data was dropped to make room for later edits",
    UndoRefusal.UNDONE: "it is already undone",
    UndoRefusal.DROPPED: "its undo data was dropped on request",
}


@dataclass(eq=False, slots=True, kw_only=True)
class Entry:
    """An edit; changed on the event loop only."""

    manifest: pb.EditManifest
    digest: bytes
    """XXH3-128 of the manifest."""
    opened: asyncio.Future[None]
    """Done once it has memory."""
    who: Who = None
    """The token that stages it; None: the owner or the control plane."""
    phase: Phase = Phase.STAGING
    op_count: int = 0
    ops: Sequence[PlannedOp] = ()
    """Empty until planned by this process, as is `edit`."""
    edit: RankEdit | None = None
    size_bytes: int = 0
    body: Body | None = None
    """An undo shares the body of the edit it undoes until it is applied, then it owns it."""
    program_begin: int = 0
    meta: Range = (0, 0)
    slot: int = -1
    intake: Intake | None = None
    data_digests: Sequence[bytes] = ()
    boundary: int = 0
    token: int = 0
    requested: bool = False
    """This process may still write its request to the page: its absence there proves nothing."""
    unready_ns: int = 0
    """When its request was first seen gone from the page; 0: still on the page."""
    step: int = -1
    edits: int = -1
    stop_ns: int = 0
    told: str = ""
    """The trainer's message about it."""
    order: int = 0
    refusal: UndoRefusal = UndoRefusal.NONE
    undoes: Entry | None = None
    undone_by: Entry | None = None
    """Its staged undo, for which its body is kept."""
    touched_ns: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its body is written."""

    @property
    def edit_id(self) -> str:
        return str(self.manifest.edit_id)

    @property
    def is_rollback(self) -> bool:
        return bool(self.manifest.HasField("rollback"))

    @property
    def undo_refusal(self) -> str:
        """Why it cannot be undone; empty if it can."""
        if self.phase is not Phase.APPLIED:
            return ""
        if self.undone_by is not None:
            return f"edit {self.undone_by.edit_id}, which undoes it, is already staged"
        return REFUSALS[self.refusal]

    @property
    def staged_bytes(self) -> int:
        """Bytes of its data present without a gap from the start."""
        return self.size_bytes if self.intake is None else self.intake.staged_bytes

    def check_author(self, who: Who) -> None:
        """Raise DeniedError if another token stages it."""
        if self.size_bytes and who != self.who:
            raise DeniedError(
                f"edit {self.edit_id} is staged here with another token, and only that token may "
                "add data; create an edit of your own"
            )

    def progress(self) -> pb.EditProgress:
        """Its state as a message."""
        applied = self.phase is Phase.APPLIED
        return pb.EditProgress(
            phase=pb.EditPhase.ValueType(self.phase),
            staged_bytes=self.staged_bytes,
            size_bytes=self.size_bytes,
            manifest_digest=self.digest,
            data_digests=self.data_digests,
            boundary=self.boundary if applied else 0,
            token=self.token if applied else 0,
            stop_ns=self.stop_ns,
            undo_refusal=self.undo_refusal,
            author=self.who or "",
            told=self.told,
        )

    def as_slot(self) -> Slot:
        """Its entry in the index, for a respawned sidecar."""
        body = self.body
        return Slot(
            phase=self.phase,
            **id_words(self.edit_id),
            meta_begin=self.meta[0],
            meta_end=self.meta[1],
            body_begin=body.begin if body is not None else 0,
            body_end=body.end if body is not None else 0,
            refusal=self.refusal,
            program_begin=self.program_begin,
            boundary=self.boundary,
            token=self.token,
            step=self.step,
            edits=self.edits,
            stop_ns=self.stop_ns,
            order=self.order,
        )

    def meta_bytes(self) -> bytes:
        """Manifest and digests, for a respawned sidecar."""
        manifest = self.manifest.SerializeToString(deterministic=True)
        progress = self.progress().SerializeToString()
        return _LENGTHS.pack(len(manifest), len(progress)) + manifest + progress


def entry_of(slot: Slot, memory: memoryview, number: int, loop: asyncio.AbstractEventLoop) -> Entry:
    """The edit that an earlier sidecar left in slot `number`; body and undo links are not set."""
    meta = memory[slot.meta_begin : slot.meta_end]
    manifest_size, progress_size = _LENGTHS.unpack_from(meta)
    begin = _LENGTHS.size + manifest_size
    manifest = pb.EditManifest.FromString(bytes(meta[_LENGTHS.size : begin]))
    progress = pb.EditProgress.FromString(bytes(meta[begin : begin + progress_size]))
    opened: asyncio.Future[None] = loop.create_future()
    opened.set_result(None)
    return Entry(
        manifest=manifest,
        digest=manifest_digest(manifest),
        opened=opened,
        who=progress.author or None,
        phase=Phase(slot.phase),
        op_count=len(manifest.ops),
        size_bytes=progress.size_bytes,
        meta=(slot.meta_begin, slot.meta_end),
        slot=number,
        data_digests=list(progress.data_digests),
        refusal=UndoRefusal(slot.refusal),
        program_begin=slot.program_begin,
        boundary=slot.boundary,
        token=slot.token,
        step=slot.step,
        edits=slot.edits,
        stop_ns=slot.stop_ns,
        order=slot.order,
    )


class Outcome(Enum):
    """The fate of an edit that is ready for request n."""

    APPLIED = "the trainer reports n as applied"
    OPEN = "n may have been agreed, or may still be"
    NEVER = "this rank will never apply n"


def fate(entry: Entry, words: Sequence[int], *, ended: Ownership | None, now_ns: int) -> Outcome:
    """The fate of a READY edit, by the control page's `words` and how the trainer `ended`; records
    in `unready_ns` since when its number is gone from the page. `now_ns`: CLOCK_MONOTONIC."""
    number, token = entry.boundary, entry.token
    # Before all others: the trainer clears it last, when the words below show what was agreed.
    promised = words[Word.PROMISED]
    if (words[Word.EDIT_APPLIED], words[Word.EDIT_TOKEN]) == (number, token):
        return Outcome.APPLIED
    agreed = words[Word.AGREED]
    if agreed == number and words[Word.AGREED_TOKEN] != token:
        return Outcome.NEVER
    if words[Word.EDIT_AGREED] == number:
        # Being applied, or the trainer died in it, which makes the rank torn.
        return Outcome.OPEN
    if ended is not None or agreed > number:
        return Outcome.NEVER
    if agreed == number:
        return Outcome.OPEN
    if words[Word.READY] == number or entry.requested:
        entry.unready_ns = 0
        return Outcome.OPEN
    entry.unready_ns = entry.unready_ns if entry.unready_ns else now_ns
    if now_ns - entry.unready_ns < WITHDRAWN_NS or promised == number:
        return Outcome.OPEN
    return Outcome.NEVER
