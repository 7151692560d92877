"""The continuation memory: whole payloads, whenever its writer dies."""

import os
from collections.abc import Iterator

import pytest

from paramd.errors import ExhaustedError
from paramd.memory.continuation import (
    MAX_PAYLOAD_BYTES,
    RECORD,
    TABLE,
    KeptSlots,
    read_kept,
    read_pair,
)
from paramd.memory.descriptors import SparseMemory, create_sparse
from paramd.memory.handover import CONTINUATION_SLOT_BYTES, continuation_bytes


@pytest.fixture
def memory() -> Iterator[SparseMemory]:
    descriptor = create_sparse("paramd-test", continuation_bytes())
    made = SparseMemory(descriptor)
    yield made
    made.close()
    os.close(descriptor)


def test_the_last_two_payloads_are_there_newest_first(memory: SparseMemory) -> None:
    assert read_kept(memory.buffer, RECORD) == []
    slots = KeptSlots(memory, RECORD)
    for text in (b"one", b"two", b"three" * 5000):
        slots.write(text)
    found = read_kept(memory.buffer, RECORD)
    assert [(kept.number, kept.payload) for kept in found] == [(3, b"three" * 5000), (2, b"two")]
    assert read_kept(memory.buffer, TABLE) == []


def test_a_successor_counts_on(memory: SparseMemory) -> None:
    KeptSlots(memory, TABLE).write(b"of the first")
    assert KeptSlots(memory, TABLE).write(b"of the second") == 2


@pytest.mark.parametrize("byte", [0, 8, 16, 64, 66])
def test_a_slot_that_was_not_finished_does_not_count(memory: SparseMemory, byte: int) -> None:
    slots = KeptSlots(memory, RECORD)
    slots.write(b"whole")
    number = slots.write(b"torn")
    at = RECORD + (number % 2) * CONTINUATION_SLOT_BYTES
    memory.buffer[at + byte] ^= 0xFF
    found = [kept.payload for kept in read_kept(memory.buffer, RECORD)]
    # A header of another number still has its own payload; any other change voids the slot.
    assert found == ([b"torn", b"whole"] if byte == 0 else [b"whole"])


def test_a_record_comes_with_the_table_it_was_made_with(memory: SparseMemory) -> None:
    record, table = KeptSlots(memory, RECORD), KeptSlots(memory, TABLE)
    record.write(b"of step 1", beside=table.write(b"first"))
    assert read_pair(memory.buffer) == (b"of step 1", b"first")
    second = table.write(b"second")
    # Killed before the record that goes with it.
    assert read_pair(memory.buffer) == (b"of step 1", b"first")
    record.write(b"of step 2", beside=second)
    assert read_pair(memory.buffer) == (b"of step 2", b"second")


def test_what_does_not_fit_is_refused_and_what_was_there_stays(memory: SparseMemory) -> None:
    slots = KeptSlots(memory, RECORD)
    slots.write(b"small")
    with pytest.raises(ExhaustedError, match="Put less"):
        slots.write(b"x" * (MAX_PAYLOAD_BYTES + 1))
    assert [kept.payload for kept in read_kept(memory.buffer, RECORD)] == [b"small"]


def test_a_rank_that_has_none_of_something_reserves_nothing(memory: SparseMemory) -> None:
    memory.reserve(0, 0)
    memory.populate(4096, 4096)
    memory.release(0, 0)
    assert os.fstat(memory.descriptor).st_blocks == 0
