"""Edits that a predecessor left in the memory, as its index names them."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress

from google.protobuf.message import DecodeError

from paramd.memory.edit_program import record_count
from paramd_service.sidecar.edit_bodies import body_of
from paramd_service.sidecar.edit_entry import Entry, Phase, UndoRefusal, entry_of
from paramd_service.sidecar.edit_index import EditIndex, Slot
from paramd_service.sidecar.edit_memory import EditMemory


def recovered(index: EditIndex, memory: EditMemory) -> dict[str, Entry]:
    """The edits by id; their memory is taken. What no slot names is free."""
    entries: dict[str, Entry] = {}
    slots: dict[str, Slot] = {}
    for number, slot in index.slots():
        entry = _entry(slot, memory, number)
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
                # An undo lies in a body that has room for it.
                undoable=bool(undo_of) or entry.refusal is UndoRefusal.NONE,
            )
    for entry in entries.values():
        _join(entry, entries.get(entry.manifest.undo_of))
    return entries


def _entry(slot: Slot, memory: EditMemory, number: int) -> Entry | None:
    with suppress(struct.error, DecodeError, ValueError):
        return entry_of(slot, memory.buffer, number, asyncio.get_running_loop())
    return None


def _join(undo: Entry, original: Entry | None) -> None:
    """Ties an undo to what it undoes, as far as that is still so."""
    if original is None or original.body is None or undo.body is None:
        return
    if original.body.begin != undo.body.begin:
        return
    if undo.phase is Phase.APPLIED:
        # The predecessor ended between telling of the undo and of what it undid.
        original.body, original.refusal = None, UndoRefusal.UNDONE
    else:
        undo.undoes, original.undone_by = original, undo
