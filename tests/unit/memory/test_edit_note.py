"""Notes of edits: what is written is read, what is none is refused."""

import pytest

from paramd.errors import ExhaustedError, UsageError
from paramd.memory.edit_program import (
    ANSWER_BYTES,
    Kept,
    NoteKind,
    note_bytes,
    read_answer,
    read_note,
    write_answer,
    write_note,
    write_payload,
)


def test_a_note_keeps_payload_numbers_and_answer_apart() -> None:
    memory = memoryview(bytearray(64 + note_bytes(100)))
    write_note(memory, 64, NoteKind.ROLLBACK, b"abc", capacity=100, numbers=(4096, 8192, 12, 0))
    write_answer(memory, 64, "no \u00e4" + "x" * ANSWER_BYTES)
    note = read_note(memory, 64)
    assert (note.kind, note.payload, note.capacity) == (NoteKind.ROLLBACK, b"abc", 100)
    assert note.numbers == (4096, 8192, 12, 0)
    assert read_answer(memory, 64).startswith("no \u00e4xxx")
    write_payload(memory, 64, b"longer than before")
    assert read_note(memory, 64).payload == b"longer than before"
    with pytest.raises(ExhaustedError, match="there is room for 100"):
        write_payload(memory, 64, bytes(101))


def test_what_is_no_note_is_refused() -> None:
    memory = memoryview(bytearray(note_bytes(8) + 64))
    for begin in (0, 4, 64, memory.nbytes):
        with pytest.raises(UsageError, match="note"):
            read_note(memory, begin)


def test_a_kept_state_is_unpacked_as_it_was_packed() -> None:
    kept = Kept(lineage=7, optimizer_bytes=64, record=b"record", table=b"table")
    assert Kept.unpacked(kept.packed()) == kept
    for data in (b"", kept.packed()[:-1], kept.packed() + b"x"):
        with pytest.raises(UsageError, match="no kept state"):
            Kept.unpacked(data)
