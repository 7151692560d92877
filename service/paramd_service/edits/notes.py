"""Open edits that change no elements by themselves: hyper-parameters, and rollbacks.

    [program][program of its undo][note]                                        hyper-parameters
    [program][program of its undo][note][arena's bytes][optimizer memory's]      rollback

The undo data of such an edit replaces the edit's own data (memory/edit_program.py), so both
programs name the same note. A rollback's body is as large as the rank's whole state; only the last
applied one is kept for its undo, beside the undo budget.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paramd.errors import ConflictError, UsageError
from paramd.memory.control_page import NEVER_REWINDABLE, ControlPage, Word
from paramd.memory.descriptors import pages
from paramd.memory.edit_program import (
    HEADER_BYTES,
    Kept,
    NoteKind,
    note_bytes,
    write_note,
    write_program,
)
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.edits.entry import Body
from paramd_service.sidecar.owner import check_keeps_states

if TYPE_CHECKING:
    from paramd_service.sidecar.kept_states import Found, StandingLabel

VALUES_BYTES = 8 << 10
"""Room for the values of hyper-parameters, old or new."""
RECORD_SPARE_BYTES = 1 << 20
"""Room for the record to grow between the staging of a rollback and its application."""

PROGRAM_ROOM = -(-HEADER_BYTES // 64) * 64

NO_BLOCK = (
    "the training script cannot be rolled back: it is not in a block of "
    "attachment.rollback_scope(); put one around its loop over batches (docs/rollback.md)"
)
COPIED = (
    "this training keeps copies of its standing snapshots on another host (replicas=1), in the "
    "order of its steps, which a rollback would break; only one without replicas can be put back"
)


def has_note(manifest: pb.EditManifest) -> bool:
    """Whether an edit changes hyper-parameters or is a rollback."""
    return bool(manifest.HasField("rollback") or manifest.HasField("hyperparameters"))


def check(manifest: pb.EditManifest, page: ControlPage) -> None:
    """Refuse what this rank's training cannot do, before anything is staged.

    Raises:
        UsageError: If malformed.
        ConflictError: If the training keeps no states, or cannot return to one.
    """
    if manifest.ops or manifest.HasField("if_step") or manifest.reset_moments:
        raise UsageError("hyperparameters, rollback: expected no ops, if_step or reset_moments")
    if manifest.HasField("rollback") and manifest.HasField("hyperparameters"):
        raise UsageError("hyperparameters, rollback: expected one of them")
    if manifest.HasField("rollback"):
        check_keeps_states(page)
        if page[Word.REWINDABLE] == NEVER_REWINDABLE:
            raise ConflictError(COPIED)
        if not page[Word.REWINDABLE]:
            raise ConflictError(NO_BLOCK)
        return
    change = manifest.hyperparameters
    try:
        values = json.loads(change.values_json)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not values or len(change.values_json) > VALUES_BYTES // 2:
        raise UsageError("hyperparameters: expected a JSON object with at least one value")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """Room for a state, and for the state that it replaces."""

    arena: int
    optimizer: int
    """Bytes of the optimizer's state in host memory."""
    device: int
    """Bytes of the optimizer's state on the device."""
    beside: int
    """Bytes of record and table."""

    @classmethod
    def of(cls, label: StandingLabel, page: ControlPage, beside_bytes: int) -> StateSizes:
        """`beside_bytes`: of the present record and table."""
        return cls(
            arena=label.arena_bytes,
            optimizer=max(label.optimizer_bytes - label.device_bytes, page[Word.OPTIMIZER_BYTES]),
            device=max(label.device_bytes, page[Word.STATE_BYTES]),
            beside=max(label.record_bytes + label.table_bytes, beside_bytes) + RECORD_SPARE_BYTES,
        )


def change_body() -> Body:
    """Layout of a change of hyper-parameters, from byte 0 on."""
    note_begin = 2 * PROGRAM_ROOM
    return _body(note_begin, note_begin + note_bytes(VALUES_BYTES), 0)


def rollback_body(sizes: StateSizes) -> Body:
    """Layout of a rollback; the state's bytes begin at `preimage_begin`."""
    note_begin = 2 * PROGRAM_ROOM
    state_begin = pages(note_begin + note_bytes(sizes.beside))
    state = (sizes.arena, sizes.optimizer, sizes.device)
    return _body(note_begin, state_begin, sum(map(pages, state)))


def placed(body: Body, begin: int, end: int) -> Body:
    first, second = body.programs
    return Body(
        begin=begin,
        end=end,
        programs=(begin + first, begin + second),
        data_begin=begin + body.data_begin,
        preimage_begin=begin + body.preimage_begin,
    )


def _body(note_begin: int, state_begin: int, state_bytes: int) -> Body:
    return Body(
        begin=0,
        end=state_begin + state_bytes,
        programs=(0, PROGRAM_ROOM),
        data_begin=note_begin,
        preimage_begin=state_begin,
    )


def write_change(memory: memoryview, body: Body, manifest: pb.EditManifest) -> None:
    """Write the program and the note of a change of hyper-parameters."""
    change = manifest.hyperparameters
    write_note(
        memory,
        body.data_begin,
        NoteKind.HYPERPARAMETERS,
        change.values_json.encode(),
        capacity=VALUES_BYTES,
        numbers=(change.optimizer, change.group, 0, 0),
    )
    write_program(memory, body.programs[0], (), note=body.data_begin)


def write_rollback(memory: memoryview, body: Body, found: Found, sizes: StateSizes) -> None:
    """Copy a kept state into the body, and write program and note.

    Raises:
        DataLossError: If the kept bytes are damaged.
    """
    label = found.label
    arena_begin = body.preimage_begin
    optimizer_begin = arena_begin + pages(label.arena_bytes)
    device_begin = optimizer_begin + pages(sizes.optimizer)
    state_end = label.arena_bytes + label.optimizer_bytes
    state_begin = 0
    for begin, size in (
        (arena_begin, label.arena_bytes),
        (optimizer_begin, label.optimizer_bytes - label.device_bytes),
        (device_begin, label.device_bytes),
    ):
        found.read_into(memory[begin : begin + size], state_begin)
        state_begin += size
    record_end = state_end + label.record_bytes
    kept = Kept(
        lineage=0,
        optimizer_bytes=label.optimizer_bytes,
        record=bytes(found.buffer[state_end:record_end]),
        table=bytes(found.buffer[record_end : record_end + label.table_bytes]),
    )
    # After the copy: bytes that were replaced or damaged meanwhile are found, too.
    found.check()
    write_note(
        memory,
        body.data_begin,
        NoteKind.ROLLBACK,
        kept.packed(),
        capacity=sizes.beside,
        numbers=(arena_begin, optimizer_begin, sizes.optimizer, sizes.device),
    )
    write_program(memory, body.programs[0], (), note=body.data_begin)
