"""Edit programs: what is written is what is parsed, and what cannot run is refused."""

import math
from dataclasses import replace

import pytest

from paramd.errors import UsageError
from paramd.layout.edits.kinds import EditKind
from paramd.memory.edit_program import (
    HEADER_BYTES,
    MAX_DIMS,
    RECORD_BYTES,
    Record,
    parse_program,
    program_bytes,
    write_program,
)

ARENA_BYTES = 4096
SET = Record(EditKind.SET, "float32", 64, (4, 8), (16, 1), data_begin=1024, preimage_begin=2048)


def round_trip(*records: Record, size_bytes: int = 1 << 16, begin: int = 0) -> list[Record]:
    memory = memoryview(bytearray(size_bytes))
    end = write_program(memory, begin, records)
    assert end == begin + program_bytes(len(records))
    return parse_program(memory, begin, arena_bytes=ARENA_BYTES)


def test_what_is_written_is_what_is_parsed() -> None:
    records = [
        SET,
        Record(EditKind.ADD, "bfloat16", 2048, (3,), (1,), data_begin=4096, weight=-1.0),
        Record(EditKind.MUL, "float64", 8, (), (), value=0.5, reset_moments=True),
        Record(EditKind.LERP, "float16", 0, (2, 1, 3), (3, 0, 1), data_begin=8, weight=0.25),
        Record(EditKind.FILL, "bool", 4095, (1,), (1,), value=1.0),
        Record(EditKind.CLAMP, "float32", 0, (1,) * MAX_DIMS, (1,) * MAX_DIMS, min=-1.0),
    ]
    assert round_trip(*records, begin=512) == records
    assert round_trip() == []


REFUSED = {
    "beyond the arena": replace(SET, arena_begin=ARENA_BYTES - 4 * 55),
    "before the arena": replace(SET, arena_begin=-4),
    "between two elements": replace(SET, arena_begin=66),
    "data between two elements": replace(SET, data_begin=1025),
    "data beyond the memory": replace(SET, data_begin=(1 << 16) - 124),
    "a pre-image beyond the memory": replace(SET, preimage_begin=(1 << 16) - 124),
    "a negative place": replace(SET, data_begin=-8),
    "no elements": replace(SET, sizes=(0, 8)),
    "a negative stride": replace(SET, strides=(-1, 1)),
    "SET without data": replace(SET, data_begin=-1),
    "FILL with data": replace(SET, op=EditKind.FILL),
    "an integer that is added to": replace(SET, op=EditKind.ADD, dtype="int32"),
    "half an integer": Record(EditKind.FILL, "int32", 0, (1,), (1,), value=0.5),
    "an integer that does not fit": Record(EditKind.FILL, "int8", 0, (1,), (1,), value=128.0),
    "an infinite integer": Record(EditKind.FILL, "int8", 0, (1,), (1,), value=math.inf),
    "a bool of 2": Record(EditKind.FILL, "bool", 0, (1,), (1,), value=2.0),
    "bounds upside down": Record(EditKind.CLAMP, "float32", 0, (1,), (1,), min=1.0, max=0.0),
    "a bound that is NaN": Record(EditKind.CLAMP, "float32", 0, (1,), (1,), min=math.nan),
    "an addition that swaps": replace(SET, op=EditKind.ADD, preimage_begin=SET.data_begin),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_is_refused_with_the_number_of_its_record(what: str) -> None:
    with pytest.raises(UsageError, match="record 1 of the edit program"):
        round_trip(SET, REFUSED[what])


def test_garbage_is_no_program() -> None:
    memory = memoryview(bytearray(1024))
    for begin in (0, 4, -8, 1024, 1016):
        with pytest.raises(UsageError):
            parse_program(memory, begin, arena_bytes=ARENA_BYTES)
    write_program(memory, 0, [SET])
    words = memory.cast("q")
    for count in (-1, 1 << 40, (1024 - HEADER_BYTES) // RECORD_BYTES + 1):
        words[1] = count
        with pytest.raises(UsageError):
            parse_program(memory, 0, arena_bytes=ARENA_BYTES)
    words[1] = 1
    for field, value in {0: 7, 1: 99, 2: 9}.items():
        write_program(memory, 0, [SET])
        words[HEADER_BYTES // 8 + field] = value
        with pytest.raises(UsageError, match="record 0"):
            parse_program(memory, 0, arena_bytes=ARENA_BYTES)


def test_a_view_of_too_many_dims_or_another_dtype_is_not_written() -> None:
    memory = memoryview(bytearray(1024))
    for bad in (replace(SET, sizes=(1,) * 9, strides=(1,) * 9), replace(SET, dtype="complex64")):
        with pytest.raises(UsageError):
            write_program(memory, 0, [bad])
