"""Digests of the memory that a trainer left, by pieces, for who takes it over.

They are made when it has ended, and checked right before its successor goes on in it, on several
threads: 7 to 17 GB/s on two cores. Up to `MOST_WHOLE_BYTES` all pieces are checked; of more memory
as many as `CHECK_S` allows, in random order, so that a successor in a hundred gigabytes waits no
longer than that and every byte has a chance.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

PIECE_BYTES = 16 << 20
MOST_PIECES = 1024
"""They travel in one message of the handover."""

MOST_WHOLE_BYTES = 8 << 30
CHECK_S = 1.0
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a check."""

    damaged: bool
    piece_count: int
    """Pieces that were compared; all, if the memory is no larger than `MOST_WHOLE_BYTES`."""
    of_count: int


def digests_of(parts: Sequence[memoryview]) -> list[int]:
    """The XXH3 of each piece of the parts, one after the other."""
    with _pool() as pool:
        return list(pool.map(xxh3_64_intdigest, _pieces(parts)))


def check(parts: Sequence[memoryview], digests: Sequence[int]) -> Checked:
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
    total = sum(part.nbytes for part in parts)
    size = max(PIECE_BYTES, -(-total // MOST_PIECES))
    return [part[at : at + size] for part in parts for at in range(0, part.nbytes, size)]


def _pool() -> ThreadPoolExecutor:
    count = min(_THREADS, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(count, thread_name_prefix="paramd-digest")
