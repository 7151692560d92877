"""Programs and notes of gradient slots: what one process writes is what the other reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory, create_sparse
from paramd.memory.gradient_program import Note, Notes, Slot, covers, united
from paramd.memory.handover import gradients_bytes, slot_bytes

ARENA_BYTES = 10_000


@pytest.fixture
def both() -> Iterator[tuple[Slot, Slot]]:
    """The second slot, mapped twice as by two processes."""
    descriptor = create_sparse("slots", gradients_bytes(ARENA_BYTES))
    memories = [SparseMemory(descriptor) for _ in range(2)]
    slots = [Slot(memory.buffer, ARENA_BYTES, 1) for memory in memories]
    yield slots[0], slots[1]
    for slot, memory in zip(slots, memories, strict=True):
        slot.close()
        memory.close()
    os.close(descriptor)


def test_rooms_do_not_overlap(both: tuple[Slot, Slot]) -> None:
    slot = both[0]
    assert slot.begin_bytes == slot_bytes(ARENA_BYTES)
    assert slot.begin_bytes + ARENA_BYTES <= slot.tail_begin_bytes < slot.end_bytes
    assert slot.end_bytes == gradients_bytes(ARENA_BYTES)


def test_a_program_is_read_as_it_was_written(both: tuple[Slot, Slot]) -> None:
    sidecar, trainer = both
    spans = [(0, 64), (128, 9_999)]
    page = dict.fromkeys(Word, 0)
    version = sidecar.write_program(spans, page)
    assert trainer.read_program() == (version, spans)
    later = sidecar.write_program([(64, 128)], page)
    assert later > version
    assert trainer.read_program() == (later, [(64, 128)])


def test_memory_that_was_given_back_has_no_program_and_no_version_comes_again(
    both: tuple[Slot, Slot],
) -> None:
    sidecar, trainer = both
    page = dict.fromkeys(Word, 0)
    before = sidecar.write_program([(0, 8)], page)
    for place in range(len(sidecar._program)):
        sidecar._program[place] = 0
    assert trainer.read_program() is None
    assert sidecar.write_program([(0, 8)], page) > before


def test_notes_are_read_as_they_were_written(both: tuple[Slot, Slot]) -> None:
    sidecar, trainer = both
    told = Notes(7, 4, 65536.0, 0.125, (Note(0, 2), Note(4096, 0, 3)), 9, 1 << 62)
    trainer.write_notes(told)
    assert sidecar.read_notes() == told


def test_spans_are_united_and_covered() -> None:
    spans = united([(8, 16), (0, 4), (4, 6), (12, 20)])
    assert spans == ((0, 6), (8, 20))
    assert covers(spans, ((0, 6), (9, 20)))
    assert covers(spans, ())
    for wanted in ((6, 7), (0, 8), (19, 21), (30, 31)):
        assert not covers(spans, (wanted,))
