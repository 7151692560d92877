"""All edits known to a rank: by id, in the persistent index, with the memory they take."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from google.protobuf.message import DecodeError

from paramd.errors import ConflictError, ExhaustedError
from paramd.memory.edit_program import record_count
from paramd_service.admission import CALLER, Shares
from paramd_service.edits.entry import (
    Body,
    EditLimits,
    Entry,
    Phase,
    UndoRefusal,
    body_of,
    entry_of,
)
from paramd_service.edits.memory import EditIndex, EditMemory, Slot

MAX_META_BYTES = 32 << 20
"""Most bytes of manifests and digests kept of applied edits; the oldest go first."""


def recovered(index: EditIndex, memory: EditMemory) -> dict[str, Entry]:
    """Recover edits by id and mark their memory as reserved; the rest is free."""
    entries: dict[str, Entry] = {}
    slots: dict[str, Slot] = {}
    for number, slot in index.slots():
        entry = None
        with suppress(struct.error, DecodeError, ValueError):
            entry = entry_of(slot, memory.buffer, number, asyncio.get_running_loop())
        if entry is None:
            index.clear(number)
            continue
        memory.take(slot.meta_begin, slot.meta_end)
        entries[entry.edit_id], slots[entry.edit_id] = entry, slot
    for edit_id, entry in entries.items():
        slot, undo_of = slots[edit_id], entry.manifest.undo_of
        if slot.body_begin and slot.program_begin:
            memory.take(slot.body_begin, slot.body_end)
            count = record_count(memory.buffer, slot.program_begin)
            entry.body = body_of(
                slot.body_begin,
                slot.body_end,
                record_count=count,
                # An undo's body has room for an undo of it.
                undoable=bool(undo_of) or entry.refusal is UndoRefusal.NONE,
            )
    for entry in entries.values():
        _join(entry, entries.get(entry.manifest.undo_of))
    return entries


def _join(undo: Entry, original: Entry | None) -> None:
    """Link an undo to its original, if that is still known."""
    if original is None or original.body is None or undo.body is None:
        return
    if original.body.begin != undo.body.begin:
        return
    if undo.phase is Phase.APPLIED:
        # The sidecar died after persisting the applied undo, before updating the original.
        original.body, original.refusal = None, UndoRefusal.UNDONE
    else:
        undo.undoes, original.undone_by = original, undo


class UndoBook:
    """Applied edits whose bodies are kept, oldest first. Event loop only."""

    def __init__(
        self, memory: EditMemory, budget_bytes: int, persist: Callable[[Entry], None]
    ) -> None:
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._persist = persist
        self._kept: list[Entry] = []

    @property
    def kept_bytes(self) -> int:
        # Rollbacks count separately: one is kept, whatever its size.
        return sum(
            one.body.size_bytes
            for one in self._kept
            if one.body is not None and not one.is_rollback
        )

    def keep(self, entry: Entry) -> None:
        """Add an applied edit that still has its body."""
        self._kept.append(entry)
        self._kept.sort(key=lambda one: one.order)

    def applied(self, entry: Entry) -> None:
        """Keep an applied edit's body for its undo, or free it."""
        original = entry.undoes
        if original is not None:
            # The undo owns the body from now on.
            self._kept.remove(original)
            original.body, original.undone_by = None, None
            original.refusal = UndoRefusal.UNDONE
            self._persist(original)
        self.keep(entry)
        if entry.refusal is not UndoRefusal.NONE:
            self.release(entry, entry.refusal)
        while self.kept_bytes > self._budget_bytes and self.drop_oldest(but_rollbacks=True):
            pass
        if entry.is_rollback:
            for other in [one for one in self._kept if one.is_rollback and one is not entry]:
                if other.undone_by is None:
                    self.release(other, UndoRefusal.CROWDED_OUT)

    def claim(self, original: Entry, undo: Entry) -> Body:
        """Claim an applied edit's body, which is kept until its undo is applied or forgotten.

        Raises:
            ConflictError: If it was not applied, or cannot be undone.
        """
        if original.phase is not Phase.APPLIED:
            raise ConflictError(f"edit {original.edit_id} was not applied on this rank")
        if original.undo_refusal or original.body is None:
            raise ConflictError(f"edit {original.edit_id}: {original.undo_refusal}")
        original.undone_by, undo.undoes = undo, original
        return original.body

    def release(self, entry: Entry, refusal: UndoRefusal) -> None:
        """Free the undo data of an applied edit."""
        body = entry.body
        assert body is not None
        self._kept.remove(entry)
        entry.body, entry.refusal = None, refusal
        # Out of the index first: a respawned sidecar must not claim reused memory.
        self._persist(entry)
        self._memory.free(body.begin, body.end)

    def drop_oldest(self, *, but_rollbacks: bool = False) -> bool:
        """Free the oldest body that no staged undo needs; False if there is none."""
        free = (one for one in self._kept if one.undone_by is None)
        oldest = next((one for one in free if not (but_rollbacks and one.is_rollback)), None)
        if oldest is not None:
            self.release(oldest, UndoRefusal.CROWDED_OUT)
        return oldest is not None


class EditBook:
    """The edits of one attachment. Event loop only."""

    def __init__(self, memory: EditMemory, limits: EditLimits) -> None:
        self.entries: dict[str, Entry] = {}
        self.undo = UndoBook(memory, limits.undo_budget_bytes, self.persist)
        self._memory = memory
        self._limits = limits
        self._index: EditIndex | None = None
        self._order = 0

    def open(self) -> None:
        """Recover the edits of an earlier sidecar from the memory, whose head must be populated."""
        self._index = EditIndex(self._memory.buffer)
        self.entries = recovered(self._index, self._memory)
        for entry in self.entries.values():
            if entry.refusal is UndoRefusal.UNDONE:
                # Its body is its undo's, and a later sidecar must not find it here.
                self.persist(entry)
            entry.touched_ns = time.monotonic_ns()
            self._order = max(self._order, entry.order)
            if entry.phase is Phase.APPLIED and entry.body is not None:
                self.undo.keep(entry)

    def close(self) -> None:
        """Release the memory's buffer."""
        self.entries.clear()
        if self._index is not None:
            self._index.close()

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory taken by edits that are not applied; undos take none."""
        return sum(
            one.body.size_bytes
            for one in self.entries.values()
            if _takes(one) and one.body is not None
        )

    def check_room(self) -> None:
        """Ensure that one more edit can be recorded. Raises ExhaustedError."""
        assert self._index is not None
        staged = Shares(self._limits.max_edits, "edits staged on this rank")
        for one in self.entries.values():
            if one.phase is not Phase.APPLIED:
                staged.count(one.who)
        staged.check(CALLER.get())
        if self._index.free_count <= staged.taken + 1 and not self._forget_oldest():
            raise ExhaustedError("too many edits on this rank; apply or drop staged ones")

    def check_rollback(self, entry: Entry) -> None:
        """Raise ExhaustedError if another rollback is staged; each takes a whole state."""
        for one in self.entries.values():
            if one is not entry and one.is_rollback and _takes(one) and one.body is not None:
                raise ExhaustedError(
                    f"rollback {one.edit_id} is staged and not applied yet; wait for it or abort it"
                )

    def check_bytes(self, entry: Entry, size_bytes: int) -> None:
        """Raise ExhaustedError if an edit of that size does not fit the budget."""
        staged = Shares(self._limits.budget_bytes, "bytes of staged edits")
        for one in self.entries.values():
            if _takes(one) and one.body is not None and not one.is_rollback:
                staged.count(one.who, one.body.size_bytes)
        staged.check(entry.who, size_bytes)

    def in_order(self, entry: Entry) -> None:
        """Make the entry the latest, and persist it as it is."""
        self._order += 1
        entry.order = self._order
        self.persist(entry)

    def persist(self, entry: Entry) -> None:
        """Write the entry that a respawned sidecar needs."""
        assert self._index is not None
        if entry.slot < 0:
            entry.slot = self._index.add(entry.as_slot())
        else:
            self._index.change(entry.slot, entry.as_slot())

    def unready(self, entry: Entry) -> None:
        """Make a ready edit STAGED again: its request will never be applied."""
        entry.phase, entry.requested, entry.unready_ns = Phase.STAGED, False, 0
        entry.touched_ns = time.monotonic_ns()
        self.persist(entry)

    def applied(self, entry: Entry) -> None:
        """Keep an applied edit's undo data, and forget the oldest beyond the limit."""
        self.in_order(entry)
        entry.ops, entry.edit = (), None
        self.undo.applied(entry)
        while self._meta_bytes() > MAX_META_BYTES and self._forget_oldest(entry):
            pass

    def drop_undo(self, entry: Entry) -> None:
        """Free the undo data of an applied edit. Raises ConflictError."""
        if entry.undone_by is not None:
            raise ConflictError(f"edit {entry.edit_id}: {entry.undo_refusal}; drop that one first")
        if entry.body is not None:
            self.undo.release(entry, UndoRefusal.DROPPED)

    def forget(self, entry: Entry) -> None:
        """Forget an edit and free everything it still has."""
        if self.entries.get(entry.edit_id) is entry:
            del self.entries[entry.edit_id]
        if entry.slot >= 0 and self._index is not None:
            self._index.clear(entry.slot)
        if entry.undoes is not None:
            entry.undoes.undone_by = None
        elif entry.body is not None:
            self._memory.free(entry.body.begin, entry.body.end)
        if entry.meta[1]:
            self._memory.free(*entry.meta)
        entry.body, entry.intake, entry.slot, entry.meta = None, None, -1, (0, 0)

    def _meta_bytes(self) -> int:
        applied = (one for one in self.entries.values() if one.phase is Phase.APPLIED)
        return sum(one.meta[1] - one.meta[0] for one in applied)

    def _forget_oldest(self, but: Entry | None = None) -> bool:
        """Forget the oldest applied edit that no staged undo needs; False if there is none."""
        oldest = min(
            (
                one
                for one in self.entries.values()
                if one.phase is Phase.APPLIED and one.undone_by is None and one is not but
            ),
            key=lambda one: one.order,
            default=None,
        )
        if oldest is None:
            return False
        if oldest.body is not None:
            self.undo.release(oldest, UndoRefusal.CROWDED_OUT)
        oldest.undoes = None
        self.forget(oldest)
        return True


def _takes(entry: Entry) -> bool:
    """Whether its body counts as memory of an edit that is not applied."""
    return entry.phase is not Phase.APPLIED and entry.undoes is None
