"""What an edit does beside changing elements of the arena: a note behind its program.

An edit program whose head names a note (edit_program.py) has no records. The trainer does what the
note says and leaves there what undoes it, so that the same note, carried out again, undoes it.

    note     kind, capacity, size, size of the answer, 4 numbers of the kind       int64
             answer, UTF-8: why the trainer refuses it, or what it has to say about it
             payload, `size` bytes of `capacity`

HYPERPARAMETERS   numbers: optimizer, group; payload: the values by name, JSON
ROLLBACK          numbers: where the arena's bytes lie in the edit memory, where the optimizer
                  memory's, how many of those there is room for, and, on whole pages behind them,
                  for how many of the state on a device; payload: a `Kept` state
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from paramd.errors import ExhaustedError, UsageError

ANSWER_BYTES = 2048

_HEAD = struct.Struct("=8q")
_PAYLOAD_BEGIN = _HEAD.size + ANSWER_BYTES
_KEPT = struct.Struct("=4q")


class NoteKind(IntEnum):
    """What a note is about."""

    HYPERPARAMETERS = 1
    ROLLBACK = 2


@dataclass(frozen=True, slots=True)
class Note:
    """A note as it stands in the edit memory."""

    begin: int
    kind: NoteKind
    numbers: tuple[int, int, int, int]
    payload: bytes
    capacity: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The payload of a ROLLBACK: what belongs to a state beside its bytes."""

    lineage: int
    """Of the state that is put back; 0: the history branches there."""
    optimizer_bytes: int
    """Bytes of the optimizer's state, wherever it is."""
    record: bytes
    table: bytes

    def packed(self) -> bytes:
        """The inverse of `unpacked`."""
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
    """Write a whole note at byte `begin`. Raises ExhaustedError: the payload is too large."""
    _HEAD.pack_into(memory, begin, kind, capacity, 0, 0, *numbers)
    write_payload(memory, begin, payload)


def write_payload(memory: memoryview, begin: int, payload: bytes) -> None:
    """Replace the payload. Raises ExhaustedError: there is no room for it."""
    capacity = _HEAD.unpack_from(memory, begin)[1]
    if len(payload) > capacity:
        raise ExhaustedError(f"{len(payload):,} bytes; there is room for {capacity:,}")
    at = begin + _PAYLOAD_BEGIN
    memory[at : at + len(payload)] = payload
    memory[begin + 16 : begin + 24] = len(payload).to_bytes(8, "little")


def read_note(memory: memoryview, begin: int) -> Note:
    """The note at byte `begin`. Raises UsageError: there is none."""
    if begin <= 0 or begin % 8 or begin + _PAYLOAD_BEGIN > memory.nbytes:
        raise UsageError(f"no note can begin at byte {begin} of {memory.nbytes}")
    kind, capacity, size, _, *numbers = _HEAD.unpack_from(memory, begin)
    at = begin + _PAYLOAD_BEGIN
    if kind not in iter(NoteKind) or not 0 <= size <= capacity <= memory.nbytes - at:
        raise UsageError(f"there is no note at byte {begin}")
    first, second, third, fourth = numbers
    return Note(
        begin,
        NoteKind(kind),
        (first, second, third, fourth),
        bytes(memory[at : at + size]),
        capacity,
    )


def write_answer(memory: memoryview, begin: int, text: str) -> None:
    """Leave the trainer's words; cut to `ANSWER_BYTES`."""
    data = text.encode()[:ANSWER_BYTES].decode(errors="ignore").encode()
    at = begin + _HEAD.size
    memory[at : at + len(data)] = data
    memory[begin + 24 : begin + 32] = len(data).to_bytes(8, "little")


def read_answer(memory: memoryview, begin: int) -> str:
    """The trainer's words; empty if it left none."""
    size = _HEAD.unpack_from(memory, begin)[3]
    at = begin + _HEAD.size
    return bytes(memory[at : at + min(max(size, 0), ANSWER_BYTES)]).decode(errors="replace")


def branch_of(token: int) -> int:
    """Lineage of the history that begins where a request with this token was agreed; never 0."""
    return token & ((1 << 62) - 1) | 1
