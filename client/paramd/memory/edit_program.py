"""Edit programs: written by a sidecar, run by its trainer to change its part of the arena.

A program lies in the edit memory, at a multiple of 8 bytes given by the request's ARGUMENT.
It consists of native 8-byte words: a header, then one record per strided view.

    header   MAGIC, record count, wanted step + 1 (0: any), note (0: none)  int64
    record   kind, dtype, dim count, flags, arena_begin, data_begin, preimage_begin  int64
             value, weight, min, max                                               float64
             8 sizes, 8 strides (unused ones 0)                                      int64

- `arena_begin` is the view's first byte in the arena; strides are in elements and not
  negative; sizes are 1 or more, and the views of one program do not overlap.
- `data_begin` is the operand's place in the edit memory: dense, row-major, in the view's dtype
  and shape. NO_DATA: the operand is `value`.
- `preimage_begin` is where the trainer keeps the view's previous contents, likewise dense.
  Equal to `data_begin` (of a SET): the two are swapped. NO_DATA: not kept.
- All places are multiples of the itemsize, in ranges the sidecar has reserved; it releases none
  of them while the trainer may run the program.

The trainer parses before it promises (`parse_program`), so that nothing is left to fail when it
applies: a program it cannot run is refused with a reason, and never agreed.

Other effects of an edit are in a note behind its program, which then has no records. The trainer
applies the note and writes the inverse into it, so that the same note, applied again, undoes it.

    note     kind, capacity, size, size of the answer, 4 numbers of the kind       int64
             answer, UTF-8: the trainer's reason for refusing it, or its remark on it
             payload, `size` bytes of `capacity`

HYPERPARAMETERS   numbers: optimizer, group; payload: the values by name, JSON
ROLLBACK          numbers: where the arena's bytes lie in the edit memory, where the optimizer
                  memory's, how many of those there is room for, and, on whole pages behind them,
                  for how many of the state on a device; payload: a `Kept` state
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from paramd.errors import ExhaustedError, UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.edits.kinds import KINDS, NUMBERS, EditKind, Kind, Numbers, numbers_of

MAGIC = 0x7061_7261_6D64_6564
MAX_DIMS = 8
MAX_RECORDS = 1_000_000
NO_DATA = -1
ANY_STEP = -1

_HEADER = struct.Struct("=4q")
_RECORD = struct.Struct("=7q4d8q8q")

HEADER_BYTES = _HEADER.size
RECORD_BYTES = _RECORD.size

ANSWER_BYTES = 2048

_NOTE_HEAD = struct.Struct("=8q")
_PAYLOAD_BEGIN = _NOTE_HEAD.size + ANSWER_BYTES
_KEPT = struct.Struct("=4q")


class Flag(IntEnum):
    """Bits of a record's flags."""

    RESET_MOMENTS = 1  # zero the optimizer state of the same elements


FLOATS = ("float32", "float64", "bfloat16", "float16")


DTYPES = (*FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")
"""By code, as torch names them."""


DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class Record(Numbers):
    """One strided view of the arena and its operation; see the module docstring."""

    op: EditKind
    dtype: str
    arena_begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    data_begin: int = NO_DATA
    preimage_begin: int = NO_DATA
    reset_moments: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def itemsize(self) -> int:
        return item_bytes(self.dtype)

    @property
    def size_bytes(self) -> int:
        """Size of the elements, dense: that of data and pre-image."""
        return self.numel * self.itemsize

    @property
    def arena_end(self) -> int:
        """One past the view's last byte in the arena."""
        last = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return self.arena_begin + (last + 1) * self.itemsize


def program_bytes(record_count: int) -> int:
    """Size of a program with this many records."""
    return HEADER_BYTES + record_count * RECORD_BYTES


def write_program(
    memory: memoryview,
    begin: int,
    records: Iterable[Record],
    *,
    if_step: int = ANY_STEP,
    note: int = 0,
) -> int:
    """Write a program at byte `begin` of `memory` and return its end.

    `if_step` is the only step at whose boundary it may be applied, `note` the byte of its note (0:
    none).

    Raises:
        UsageError: For more than MAX_DIMS dims, or a dtype without a code.
    """
    end = begin + HEADER_BYTES
    count = 0
    for record in records:
        _write_record(memory, end, record)
        end += RECORD_BYTES
        count += 1
    _HEADER.pack_into(memory, begin, MAGIC, count, if_step + 1, note)
    return end


def _write_record(memory: memoryview, begin: int, record: Record) -> None:
    if len(record.sizes) > MAX_DIMS or record.dtype not in DTYPE_CODES:
        raise UsageError(
            f"a view of {len(record.sizes)} dims of {record.dtype} cannot be edited; expected at "
            f"most {MAX_DIMS} dims of {', '.join(DTYPE_CODES)}"
        )
    unused = (0,) * (MAX_DIMS - len(record.sizes))
    _RECORD.pack_into(
        memory,
        begin,
        record.op,
        DTYPE_CODES[record.dtype],
        len(record.sizes),
        Flag.RESET_MOMENTS if record.reset_moments else 0,
        record.arena_begin,
        record.data_begin,
        record.preimage_begin,
        *numbers_of(record).values(),
        *record.sizes,
        *unused,
        *record.strides,
        *unused,
    )


def record_count(memory: memoryview, begin: int) -> int:
    """Number of records of the program at byte `begin`; 0 when there is none."""
    if not 0 <= begin <= memory.nbytes - HEADER_BYTES:
        return 0
    magic, count, _, _ = _HEADER.unpack_from(memory, begin)
    return int(count) if magic == MAGIC else 0


def wanted_step(memory: memoryview, begin: int) -> int:
    """The `if_step` of the program at byte `begin`, or ANY_STEP."""
    return int(_HEADER.unpack_from(memory, begin)[2]) - 1


def note_of(memory: memoryview, begin: int) -> int:
    """The byte of the note of the program at byte `begin`; 0: it has none."""
    return int(_HEADER.unpack_from(memory, begin)[3])


def parse_program(memory: memoryview, begin: int, *, arena_bytes: int) -> list[Record]:
    """Parse and check the program at byte `begin` of the edit memory.

    UsageError names the record: not a program, bytes outside the arena or `memory`, or an operation
    its dtype does not support.
    """
    if begin < 0 or begin % 8 or begin + HEADER_BYTES > memory.nbytes:
        raise UsageError(f"no edit program can begin at byte {begin} of {memory.nbytes}")
    magic, count, _, _ = _HEADER.unpack_from(memory, begin)
    if magic != MAGIC:
        raise UsageError(f"there is no edit program at byte {begin}")
    if not 0 <= count <= MAX_RECORDS or begin + program_bytes(count) > memory.nbytes:
        raise UsageError(f"an edit program of {count} records does not fit at byte {begin}")
    # Copy before checking: shared memory may change, and only checked bytes may run.
    words = bytes(memory[begin + HEADER_BYTES : begin + program_bytes(count)])
    records = []
    for number, fields in enumerate(_RECORD.iter_unpack(words)):
        try:
            records.append(_checked(fields, arena_bytes, memory.nbytes))
        except UsageError as error:
            raise UsageError(f"record {number} of the edit program {error}") from None
    return records


def _checked(fields: tuple[float, ...], arena_bytes: int, memory_bytes: int) -> Record:
    op, code, dim_count, flags, arena_begin, data_begin, preimage_begin = map(int, fields[:7])
    known = op in KINDS and 0 <= code < len(DTYPES)
    if not (known and 0 <= dim_count <= MAX_DIMS):
        raise UsageError(f"has op {op}, dtype code {code} and {dim_count} dims; none such is known")
    sizes = tuple(int(n) for n in fields[11 : 11 + dim_count])
    strides = tuple(int(n) for n in fields[19 : 19 + dim_count])
    record = Record(
        op=EditKind(op),
        dtype=DTYPES[code],
        arena_begin=arena_begin,
        sizes=sizes,
        strides=strides,
        data_begin=data_begin,
        preimage_begin=preimage_begin,
        reset_moments=bool(flags & Flag.RESET_MOMENTS),
        **dict(zip(NUMBERS, fields[7:11], strict=True)),
    )
    if any(n < 1 for n in sizes) or any(n < 0 for n in strides):
        raise UsageError(
            f"has sizes {sizes} and strides {strides}; expected above 0, and not below 0"
        )
    _check_places(record, arena_bytes, memory_bytes)
    _check_operand(record, KINDS[record.op], floating=record.dtype in FLOATS)
    return record


def _check_places(record: Record, arena_bytes: int, memory_bytes: int) -> None:
    itemsize = record.itemsize
    if record.arena_begin < 0 or record.arena_begin % itemsize or record.arena_end > arena_bytes:
        raise UsageError(
            f"names bytes {record.arena_begin} to {record.arena_end} of an arena of {arena_bytes}"
        )
    for place in (record.data_begin, record.preimage_begin):
        if place == NO_DATA:
            continue
        if place < 0 or place % itemsize or place + record.size_bytes > memory_bytes:
            raise UsageError(
                f"names {record.size_bytes} bytes from {place} on of {memory_bytes} bytes of edits"
            )


def _check_operand(record: Record, kind: Kind, *, floating: bool) -> None:
    op, has_data = record.op, record.data_begin != NO_DATA
    if not floating and record.dtype not in kind.others:
        raise UsageError(f"would {op.name} elements of {record.dtype}; they can only be set")
    if not (kind.with_data if has_data else kind.without_data):
        raise UsageError(f"would {op.name} {'with' if has_data else 'without'} data")
    if has_data and record.preimage_begin == record.data_begin and op is not EditKind.SET:
        raise UsageError(f"would swap data with what it held, in {op.name}")
    if not floating and not has_data and not _fits(record.dtype, record.value):
        raise UsageError(f"would {op.name} {record.dtype} with {record.value}")
    if "min" in kind.numbers and not record.min <= record.max:
        raise UsageError(f"would {op.name} to [{record.min}, {record.max}]")


def _fits(dtype: str, value: float) -> bool:
    """Whether a non-floating dtype can represent this value exactly."""
    bits = 8 * item_bytes(dtype)
    signed = dtype.startswith("int")
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return value.is_integer() and least <= value <= (1 if dtype == "bool" else most)


class NoteKind(IntEnum):
    HYPERPARAMETERS = 1
    ROLLBACK = 2


@dataclass(frozen=True, slots=True)
class Note:
    """A note in the edit memory."""

    begin: int
    kind: NoteKind
    numbers: tuple[int, ...]
    payload: bytes
    capacity: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The payload of a ROLLBACK: a state's data beside its bytes."""

    lineage: int
    """Lineage of the state that is put back; 0: the history branches there."""
    optimizer_bytes: int
    """Bytes of the optimizer's state, wherever it is."""
    record: bytes
    table: bytes

    def packed(self) -> bytes:
        sizes = (self.lineage, self.optimizer_bytes, len(self.record), len(self.table))
        return _KEPT.pack(*sizes) + self.record + self.table

    @classmethod
    def unpacked(cls, data: bytes) -> Kept:
        """Raises UsageError: malformed."""
        if len(data) < _KEPT.size:
            raise UsageError(f"{len(data)} bytes are no kept state")
        lineage, used, record, table = _KEPT.unpack_from(data)
        begin = _KEPT.size
        if min(used, record, table) < 0 or begin + record + table != len(data):
            raise UsageError(f"{len(data)} bytes are no kept state of {record} and {table} bytes")
        return cls(
            lineage=lineage,
            optimizer_bytes=used,
            record=data[begin : begin + record],
            table=data[begin + record :],
        )


def note_bytes(capacity: int) -> int:
    """Size of a note whose payload may have up to `capacity` bytes."""
    return _PAYLOAD_BEGIN + capacity


def write_note(
    memory: memoryview,
    begin: int,
    kind: NoteKind,
    payload: bytes,
    *,
    capacity: int,
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> None:
    """Write a whole note at byte `begin`.

    Raises:
        ExhaustedError: The payload is too large.
    """
    _NOTE_HEAD.pack_into(memory, begin, kind, capacity, 0, 0, *numbers)
    write_payload(memory, begin, payload)


def write_payload(memory: memoryview, begin: int, payload: bytes) -> None:
    """Replace the payload.

    Raises:
        ExhaustedError: There is no room for it.
    """
    capacity = _NOTE_HEAD.unpack_from(memory, begin)[1]
    if len(payload) > capacity:
        raise ExhaustedError(f"{len(payload):,} bytes; there is room for {capacity:,}")
    at = begin + _PAYLOAD_BEGIN
    memory[at : at + len(payload)] = payload
    memory[begin + 16 : begin + 24] = len(payload).to_bytes(8, "little")


def read_note(memory: memoryview, begin: int) -> Note:
    """The note at byte `begin`.

    Raises:
        UsageError: There is none.
    """
    if begin <= 0 or begin % 8 or begin + _PAYLOAD_BEGIN > memory.nbytes:
        raise UsageError(f"no note can begin at byte {begin} of {memory.nbytes}")
    kind, capacity, size, _, *numbers = _NOTE_HEAD.unpack_from(memory, begin)
    at = begin + _PAYLOAD_BEGIN
    if kind not in iter(NoteKind) or not 0 <= size <= capacity <= memory.nbytes - at:
        raise UsageError(f"there is no note at byte {begin}")
    return Note(begin, NoteKind(kind), tuple(numbers), bytes(memory[at : at + size]), capacity)


def write_answer(memory: memoryview, begin: int, text: str) -> None:
    """Write the trainer's answer, cut to `ANSWER_BYTES`."""
    data = text.encode()[:ANSWER_BYTES].decode(errors="ignore").encode()
    at = begin + _NOTE_HEAD.size
    memory[at : at + len(data)] = data
    memory[begin + 24 : begin + 32] = len(data).to_bytes(8, "little")


def read_answer(memory: memoryview, begin: int) -> str:
    """The trainer's answer; empty if there is none."""
    size = _NOTE_HEAD.unpack_from(memory, begin)[3]
    at = begin + _NOTE_HEAD.size
    return bytes(memory[at : at + min(max(size, 0), ANSWER_BYTES)]).decode(errors="replace")


def branch_of(token: int) -> int:
    """Lineage of the history that begins where a request with this token was agreed; never 0."""
    return token & ((1 << 62) - 1) | 1
