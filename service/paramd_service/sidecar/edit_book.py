"""All edits that a rank knows: by id, in the index, with the memory they take."""

from __future__ import annotations

import time

from paramd.errors import ConflictError, ExhaustedError
from paramd_service.sidecar.edit_entry import Entry, Phase, UndoRefusal
from paramd_service.sidecar.edit_index import EditIndex
from paramd_service.sidecar.edit_limits import EditLimits
from paramd_service.sidecar.edit_memory import EditMemory
from paramd_service.sidecar.edit_recovery import recovered
from paramd_service.sidecar.edit_undo import UndoBook

MAX_TOLD_BYTES = 32 << 20
"""Manifests and digests of applied edits that are kept to be told; the oldest go first."""


class EditBook:
    """The edits of one possession. On the event loop."""

    def __init__(self, memory: EditMemory, limits: EditLimits) -> None:
        self.entries: dict[str, Entry] = {}
        self.undo = UndoBook(memory, limits.undo_budget_bytes, self.persist)
        self._memory = memory
        self._limits = limits
        self._index: EditIndex | None = None
        self._order = 0

    def open(self) -> None:
        """Finds what a predecessor left in the memory, whose head has its pages."""
        self._index = EditIndex(self._memory.buffer)
        self.entries = recovered(self._index, self._memory)
        for entry in self.entries.values():
            entry.touched_ns = time.monotonic_ns()
            self._order = max(self._order, entry.order)
            if entry.phase is Phase.APPLIED and entry.body is not None:
                self.undo.keep(entry)

    def close(self) -> None:
        """Lets go of the memory's buffer."""
        self.entries.clear()
        if self._index is not None:
            self._index.close()

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that edits which are not applied take; undos take none."""
        return sum(
            one.body.size_bytes
            for one in self.entries.values()
            if one.phase is not Phase.APPLIED and one.undoes is None and one.body is not None
        )

    def check_room(self) -> None:
        """Sees to it that one more edit can be known. Raises ExhaustedError."""
        assert self._index is not None
        staged = sum(one.phase is not Phase.APPLIED for one in self.entries.values())
        if staged >= self._limits.max_edits:
            raise ExhaustedError(
                f"{staged} edits are staged on this rank, which is its limit; commit or abort some"
            )
        if self._index.free_count <= staged + 1 and not self._forget_oldest():
            raise ExhaustedError("too many edits are known here; apply or drop what is staged")

    def in_order(self, entry: Entry) -> None:
        """The entry is the latest, and its successor will know it as it is."""
        self._order += 1
        entry.order = self._order
        self.persist(entry)

    def persist(self, entry: Entry) -> None:
        """Writes what a successor must know."""
        assert self._index is not None
        if entry.slot < 0:
            entry.slot = self._index.add(entry.as_slot())
        else:
            self._index.change(entry.slot, entry.as_slot())

    def unready(self, entry: Entry) -> None:
        """Nobody will apply a ready edit at its request: it is staged as before."""
        entry.phase, entry.unready_ns = Phase.STAGED, 0
        entry.touched_ns = time.monotonic_ns()
        self.persist(entry)

    def applied(self, entry: Entry) -> None:
        """An edit was applied: what undoes it is kept, what told of the oldest may go."""
        self.in_order(entry)
        entry.ops, entry.edit = (), None
        self.undo.applied(entry)
        while self._told_bytes() > MAX_TOLD_BYTES and self._forget_oldest(entry):
            pass

    def drop_undo(self, entry: Entry) -> None:
        """Lets go of what would undo an applied edit. Raises ConflictError."""
        if entry.undone_by is not None:
            raise ConflictError(f"edit {entry.edit_id}: {entry.undo_refusal}; drop that one first")
        if entry.body is not None:
            self.undo.let_go(entry, UndoRefusal.DROPPED)

    def forget(self, entry: Entry) -> None:
        """Everything of an edit that is not applied goes."""
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

    def _told_bytes(self) -> int:
        applied = (one for one in self.entries.values() if one.phase is Phase.APPLIED)
        return sum(one.meta[1] - one.meta[0] for one in applied)

    def _forget_oldest(self, but: Entry | None = None) -> bool:
        """Forgets the oldest applied edit that no staged undo needs; False: there is none."""
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
            self.undo.let_go(oldest, UndoRefusal.CROWDED_OUT)
        oldest.undoes = None
        self.forget(oldest)
        return True
