"""Rooms of gradient slots, and which spans a program covers."""

import os
from contextlib import closing

from paramd.memory.descriptors import SparseMemory, create_sparse
from paramd.memory.gradient_program import Slot, covers, united
from paramd.memory.handover import gradients_bytes, slot_bytes

ARENA_BYTES = 10_000


def test_rooms_do_not_overlap() -> None:
    descriptor = create_sparse("slots", gradients_bytes(ARENA_BYTES))
    memory = SparseMemory(descriptor)
    with closing(Slot(memory.buffer, ARENA_BYTES, 1)) as slot:
        assert slot.begin_bytes == slot_bytes(ARENA_BYTES)
        assert slot.begin_bytes + ARENA_BYTES <= slot.tail_begin_bytes < slot.end_bytes
        assert slot.end_bytes == gradients_bytes(ARENA_BYTES)
    memory.close()
    os.close(descriptor)


def test_spans_are_united_and_covered() -> None:
    spans = united([(8, 16), (0, 4), (4, 6), (12, 20)])
    assert spans == ((0, 6), (8, 20))
    assert covers(spans, ((0, 6), (9, 20)))
    assert covers(spans, ())
    for wanted in ((6, 7), (0, 8), (19, 21), (30, 31)):
        assert not covers(spans, (wanted,))
