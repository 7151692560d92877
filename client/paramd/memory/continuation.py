"""Memory for resuming beside the arena: the record of a boundary, and the table of state.

The continuation memory has two slots for the record and two for the table (and two for extra
state, trainer/model/extra_state.py), written in turn: a
process killed at any moment leaves the previous one intact. A slot is a header and its payload. The
header has a number, the payload's size and XXH3, and for a record the number of its table; the
number is 0 while the slot is written. Of the intact slots the highest number counts.

A record names its step (trainer/resume). Its table lists the place of each state tensor in the
optimizer memory, and changes only when one appears or moves.

The memory itself has digests, by pieces. They are made when its trainer has ended, and checked
right before training resumes in it, on several threads: 7 to 17 GB/s on two cores. Up to
`MOST_WHOLE_BYTES` all pieces are checked; of more memory as many as `CHECK_S` allows, in random
order, so that resuming in a hundred gigabytes waits no longer than that and every byte has a
chance.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from xxhash import xxh3_64, xxh3_64_intdigest

from paramd.errors import ExhaustedError
from paramd.memory.descriptors import PAGE, SparseMemory, pages
from paramd.memory.handover import CONTINUATION_SLOT_BYTES

RECORD, TABLE, EXTRA = (pair * 2 * CONTINUATION_SLOT_BYTES for pair in range(3))
"""First byte of the record's slots, the table's, and those of extra state."""

MAX_PAYLOAD_BYTES = CONTINUATION_SLOT_BYTES - PAGE

_HEADER = struct.Struct("=QQQQ")
_PAYLOAD_BEGIN = 64

PIECE_BYTES = 16 << 20
MOST_PIECES = 1024
"""They travel in one message of the handover."""

MOST_WHOLE_BYTES = 8 << 30
CHECK_S = 1.0
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """A whole payload and its number."""

    number: int
    payload: bytes
    beside: int = 0
    """The number of a record's table."""


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
        """Number of the last payload written; 0 before the first."""

    def write(self, payload: bytes, *, beside: int = 0) -> int:
        """Write the next payload over the last but one; return its number.

        `beside` is the number of a record's table.

        Raises:
            ExhaustedError: If the payload is too large, or the machine has no memory for it.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ExhaustedError(
                f"the state for a restarted trainer has {len(payload):,} bytes; at most "
                f"{MAX_PAYLOAD_BYTES:,} fit. Put less into extra_state"
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


@dataclass(frozen=True, slots=True)
class Checked:
    damaged: bool
    piece_count: int
    """Pieces that were compared; all, if the memory is no larger than `MOST_WHOLE_BYTES`."""
    of_count: int


def digest_of(*parts: memoryview) -> int:
    """The XXH3 of bytes, computed piece by piece; never 0."""
    summed = xxh3_64()
    for piece in _pieces(parts):
        summed.update(piece)
    return summed.intdigest() or 1


def digests_of(parts: Sequence[memoryview]) -> list[int]:
    """The XXH3 of each piece of the parts, one after the other."""
    with _pool() as pool:
        return list(pool.map(xxh3_64_intdigest, _pieces(parts)))


def check_left(parts: Sequence[memoryview], digests: Sequence[int]) -> Checked:
    """Compare memory with the digests made of it. See the module docstring for how much."""
    pieces = _pieces(parts)
    if len(pieces) != len(digests):
        return Checked(True, 0, len(pieces))
    whole = sum(part.nbytes for part in parts) <= MOST_WHOLE_BYTES
    order = list(range(len(pieces)))
    if not whole:
        random.SystemRandom().shuffle(order)
    until_s = time.monotonic() + CHECK_S

    def same(index: int) -> bool | None:
        if not whole and time.monotonic() > until_s:
            return None
        return xxh3_64_intdigest(pieces[index]) == digests[index]

    with _pool() as pool:
        found = [one for one in pool.map(same, order) if one is not None]
    return Checked(not all(found), len(found), len(pieces))


def _pieces(parts: Sequence[memoryview]) -> list[memoryview]:
    size = max(PIECE_BYTES, -(-sum(part.nbytes for part in parts) // MOST_PIECES))
    return [part[at : at + size] for part in parts for at in range(0, part.nbytes, size)]


def _pool() -> ThreadPoolExecutor:
    count = min(_THREADS, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(count, thread_name_prefix="paramd-digest")
