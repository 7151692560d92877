"""Where a snapshot's bytes land: straight at an address, or block by block through `store`.

Two ways fill places: a stream, in order of offsets (`PlaceSink`), and threads that copy
from memory of the same host, in any order (`fill_from`). No torch here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import Protocol

MAX_BLOCK_BYTES = 8 << 20
"""Largest place with a `store`: the size of the memory that it goes through."""

PART_BYTES = 16 << 20
"""Bytes copied by one thread before it looks for more work."""

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [begin, end) of a snapshot, and where they go; exactly one way is set."""

    begin: int
    end: int
    address: int | None = None
    """They are copied there as they are."""
    store: Callable[[int], None] | None = None
    """Takes them from an aligned address; at most `MAX_BLOCK_BYTES`, all at once."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class Scratch:
    """Memory that blocks go through, made once it is needed, then used again."""

    def __init__(self) -> None:
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        self._address = 0

    def address(self, size_bytes: int) -> int:
        """Aligned memory of at least `size_bytes`; its old content is lost when it grows."""
        if self._memory is None or len(self._memory) < size_bytes + _ALIGNMENT_BYTES:
            self._memory = (ctypes.c_char * (size_bytes + _ALIGNMENT_BYTES))()
            base = ctypes.addressof(self._memory)
            self._address = -(-base // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._address


class PlaceSink:
    """Takes a snapshot in order of offsets. `places` are sorted by `begin`.

    They may leave gaps, whose bytes are dropped, and overlap where tensors share memory.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._at = 0
        """First place that is not full yet."""
        self._filling: dict[int, Scratch] = {}
        self._spare: list[Scratch] = []

    def write(self, offset_bytes: int, address: int, size_bytes: int) -> None:
        """Copies `size_bytes` from `address` to where snapshot byte `offset_bytes` belongs."""
        end_bytes = offset_bytes + size_bytes
        for number in range(self._at, len(self._places)):
            place = self._places[number]
            if place.begin >= end_bytes:
                break
            begin = max(place.begin, offset_bytes)
            end = min(place.end, end_bytes)
            if begin < end:
                self._move(number, begin - place.begin, address + begin - offset_bytes, end - begin)
        while self._at < len(self._places) and self._places[self._at].end <= end_bytes:
            self._at += 1

    def _move(self, number: int, within: int, address: int, size_bytes: int) -> None:
        place = self._places[number]
        if place.address is not None:
            ctypes.memmove(place.address + within, address, size_bytes)
            return
        assert place.store is not None
        if size_bytes == place.size_bytes and address % _ALIGNMENT_BYTES == 0:
            place.store(address)
            return
        if number not in self._filling:
            self._filling[number] = self._spare.pop() if self._spare else Scratch()
        scratch = self._filling[number].address(place.size_bytes)
        ctypes.memmove(scratch + within, address, size_bytes)
        if within + size_bytes == place.size_bytes:
            place.store(scratch)
            self._spare.append(self._filling.pop(number))


class RandomAccess(Protocol):
    """A snapshot whose bytes can be had in any order, by several threads."""

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copies bytes of the snapshot to `address`."""


def fill_from(
    jobs: Iterable[tuple[RandomAccess, Sequence[Place]]], pool: Executor, thread_count: int
) -> None:
    """Fills the places of every snapshot with threads of the pool. Blocks until done.

    Raises:
        ParamdError: a source's; the places' content is then undefined.
    """
    # A list's iterator: the interpreter's lock makes each `next` atomic.
    parts = iter([(source, part) for source, places in jobs for part in _parts(places)])
    failed = threading.Event()

    def work() -> None:
        scratch = Scratch()
        try:
            for source, part in parts:
                if failed.is_set():
                    return
                _fill(source, part, scratch)
        except BaseException:
            failed.set()
            raise

    workers = [pool.submit(work) for _ in range(thread_count)]
    # Nobody may still write when the caller frees what is written to.
    wait(workers)
    for worker in workers:
        worker.result()


def _fill(source: RandomAccess, part: Place, scratch: Scratch) -> None:
    if part.address is not None:
        source.read_into(part.address, part.begin, part.size_bytes)
        return
    assert part.store is not None
    address = scratch.address(part.size_bytes)
    source.read_into(address, part.begin, part.size_bytes)
    part.store(address)


def _parts(places: Iterable[Place]) -> Iterator[Place]:
    for place in places:
        if place.address is None:
            yield place
            continue
        for begin in range(place.begin, place.end, PART_BYTES):
            end = min(begin + PART_BYTES, place.end)
            yield Place(begin, end, place.address + begin - place.begin)
