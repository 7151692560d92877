"""What is kept of applied edits, so that they can be undone, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable

from paramd.errors import ConflictError
from paramd_service.sidecar.edit_bodies import Body
from paramd_service.sidecar.edit_entry import Entry, Phase, UndoRefusal
from paramd_service.sidecar.edit_memory import EditMemory


class UndoBook:
    """Applied edits whose bodies are kept, oldest first. On the event loop."""

    def __init__(
        self, memory: EditMemory, budget_bytes: int, persist: Callable[[Entry], None]
    ) -> None:
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._persist = persist
        self._kept: list[Entry] = []

    @property
    def kept_bytes(self) -> int:
        return sum(one.body.size_bytes for one in self._kept if one.body is not None)

    def keep(self, entry: Entry) -> None:
        """An applied edit that has its body, as a predecessor left it."""
        self._kept.append(entry)
        self._kept.sort(key=lambda one: one.order)

    def applied(self, entry: Entry) -> None:
        """An edit was applied: its body is kept for its own undo, or let go of."""
        original = entry.undoes
        if original is not None:
            # The body is the undo's from now on.
            self._kept.remove(original)
            original.body, original.undone_by = None, None
            original.refusal = UndoRefusal.UNDONE
            self._persist(original)
        self.keep(entry)
        if entry.refusal is not UndoRefusal.NONE:
            self.let_go(entry, entry.refusal)
        while self.kept_bytes > self._budget_bytes and self.drop_oldest():
            pass

    def claim(self, original: Entry, undo: Entry) -> Body:
        """The body of an applied edit, which stays until its undo is applied or forgotten.

        Raises:
            ConflictError: it was not applied, or cannot be undone.
        """
        if original.phase is not Phase.APPLIED:
            raise ConflictError(f"edit {original.edit_id} was not applied on this rank")
        if original.undo_refusal or original.body is None:
            raise ConflictError(f"edit {original.edit_id}: {original.undo_refusal}")
        original.undone_by, undo.undoes = undo, original
        return original.body

    def let_go(self, entry: Entry, refusal: UndoRefusal) -> None:
        """Frees what would undo an applied edit."""
        body = entry.body
        assert body is not None
        self._kept.remove(entry)
        entry.body, entry.refusal = None, refusal
        self._persist(entry)
        self._memory.free(body.begin, body.end)

    def drop_oldest(self) -> bool:
        """Frees the oldest that no staged undo needs; False when there is none."""
        oldest = next((one for one in self._kept if one.undone_by is None), None)
        if oldest is not None:
            self.let_go(oldest, UndoRefusal.CROWDED_OUT)
        return oldest is not None
