"""What a successor needs beside the arena: the record of a boundary, and the table of state.

The continuation memory has two slots for the record and two for the table, written in turn: a
process killed at any moment leaves the one before whole. A slot is a header and its payload. The
header has a number, the payload's size and XXH3, and of a record the number of its table; the
number is 0 while the slot is written. Of the whole slots the highest number counts.

A record names its step (trainer/resume). Its table says where in the optimizer memory each state
tensor lies, and changes only when one appears or moves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from paramd.errors import ExhaustedError
from paramd.memory.descriptors import PAGE, SparseMemory, pages
from paramd.memory.handover import CONTINUATION_SLOT_BYTES

RECORD, TABLE = 0, 2 * CONTINUATION_SLOT_BYTES
"""First byte of the record's slots, and of the table's."""

MAX_PAYLOAD_BYTES = CONTINUATION_SLOT_BYTES - PAGE

_HEADER = struct.Struct("=QQQQ")
_PAYLOAD_BEGIN = 64


@dataclass(frozen=True, slots=True)
class Kept:
    """A whole payload and its number."""

    number: int
    payload: bytes
    beside: int = 0
    """Of a record: the number of its table."""


def read_kept(memory: memoryview, begin: int) -> list[Kept]:
    """The whole payloads of the two slots at `begin`, newest first."""
    found = []
    for slot in range(2):
        at = begin + slot * CONTINUATION_SLOT_BYTES
        number, size, digest, beside = _HEADER.unpack_from(memory, at)
        if not number or size > MAX_PAYLOAD_BYTES:
            continue
        payload = bytes(memory[at + _PAYLOAD_BEGIN : at + _PAYLOAD_BEGIN + size])
        if xxh3_64_intdigest(payload) == digest:
            found.append(Kept(number, payload, beside))
    return sorted(found, key=lambda kept: kept.number, reverse=True)


def read_pair(memory: memoryview) -> tuple[bytes, bytes] | None:
    """The newest record whose table is whole, and that table."""
    tables = {kept.number: kept.payload for kept in read_kept(memory, TABLE)}
    for record in read_kept(memory, RECORD):
        if record.beside in tables:
            return record.payload, tables[record.beside]
    return None


class KeptSlots:
    """The writer of two slots. Training thread only."""

    def __init__(self, memory: SparseMemory, begin: int) -> None:
        self._memory = memory
        self._begin = begin
        self._reserved = [0, 0]
        whole = read_kept(memory.buffer, begin)
        self.number = whole[0].number if whole else 0
        """Of the last payload written; 0 before the first."""

    def write(self, payload: bytes, *, beside: int = 0) -> int:
        """Write the next payload over the last but one; return its number.

        Args:
            beside: of a record, the number of its table.

        Raises:
            ExhaustedError: it is too large, or the machine has no memory for it.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ExhaustedError(
                f"{len(payload):,} bytes are to be kept for a successor; at most "
                f"{MAX_PAYLOAD_BYTES:,} fit, keep less"
            )
        number = self.number + 1
        slot = number % 2
        at = self._begin + slot * CONTINUATION_SLOT_BYTES
        needed = pages(_PAYLOAD_BEGIN + len(payload))
        if needed > self._reserved[slot]:
            self._memory.reserve(at, at + needed)
            self._reserved[slot] = needed
        buffer = self._memory.buffer
        # The number last: a slot that was not finished does not count.
        _HEADER.pack_into(buffer, at, 0, 0, 0, 0)
        buffer[at + _PAYLOAD_BEGIN : at + _PAYLOAD_BEGIN + len(payload)] = payload
        _HEADER.pack_into(buffer, at, 0, len(payload), xxh3_64_intdigest(payload), beside)
        buffer[at : at + 8] = number.to_bytes(8, "little")
        self.number = number
        return number
