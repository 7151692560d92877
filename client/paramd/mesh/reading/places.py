"""Destinations of a snapshot's bytes: places in tensors, filled by streams or by threads. No torch.

Bytes land in `Place`s, copied to an address or passed to `store` block by block. Places are
filled in order of offsets (`PlaceSink`), or by threads that copy from shared memory, in any order
(`fill_from`).
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from paramd.errors import DeadlineError

MAX_BLOCK_BYTES = 8 << 20
"""Largest place with a `store`, and so of its scratch memory."""

PART_BYTES = 16 << 20
"""Bytes that a thread copies per work item."""

DIRECT_BYTES = 64 << 10
"""Fewer bytes are cheaper to copy than to receive by a separate call."""

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Destination of bytes [begin, end) of a snapshot; `address` or `store` is set."""

    begin: int
    end: int
    address: int | None = None
    """Copied there unchanged."""
    store: Callable[[int], None] | None = None
    """Called once with the aligned address of all the bytes, at most `MAX_BLOCK_BYTES`."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class Scratch:
    """Reusable aligned memory, allocated on first use."""

    def __init__(self) -> None:
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        self._address = 0

    def address(self, size_bytes: int) -> int:
        """Address of at least `size_bytes`; growing loses the contents."""
        if self._memory is None or len(self._memory) < size_bytes + _ALIGNMENT_BYTES:
            self._memory = (ctypes.c_char * (size_bytes + _ALIGNMENT_BYTES))()
            base = ctypes.addressof(self._memory)
            self._address = -(-base // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._address


class PlaceSink:
    """Writes a snapshot, in order of offsets, to `places` sorted by `begin`.

    Bytes in gaps between places are dropped. Places overlap where tensors share memory.
    `landed` is called with the size of each part that has come.
    """

    def __init__(
        self, places: Sequence[Place], landed: Callable[[int], object] = lambda size_bytes: None
    ) -> None:
        self._places = places
        self.landed = landed
        self._direct = _direct(places)
        self._direct_ends = [place.end for place in self._direct]
        self._at = 0
        """Index of the first place that is not full."""
        self._filling: dict[int, Scratch] = {}
        self._spare: list[Scratch] = []

    def direct(self, begin: int, end: int) -> tuple[int | None, int]:
        """The address where bytes of [begin, end) may be put directly, and up to which offset.

        The address is None for bytes up to that offset that must pass through `write`, among
        them those that two places share. Changes nothing: a window may be received again.
        """
        for number in range(bisect_right(self._direct_ends, begin), len(self._direct)):
            place = self._direct[number]
            if place.begin >= end:
                break
            first, until = max(place.begin, begin), min(place.end, end)
            if until - first < DIRECT_BYTES:
                continue
            if first > begin:
                return None, first
            assert place.address is not None
            return place.address + begin - place.begin, until
        return None, end

    def write(self, offset_bytes: int, address: int, size_bytes: int) -> None:
        """Take `size_bytes` at `address`, from snapshot byte `offset_bytes` on."""
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


def _direct(places: Sequence[Place]) -> list[Place]:
    """Places that bytes may be received into: large, and without bytes of another one."""
    ends = [0, *accumulate((place.end for place in places), max)]
    nexts = [*(place.begin for place in places[1:]), ends[-1]]
    return [
        place
        for before, place, following in zip(ends, places, nexts, strict=False)
        if place.address is not None
        and place.size_bytes >= DIRECT_BYTES
        and before <= place.begin
        and place.end <= following
    ]


class RandomAccess(Protocol):
    """A snapshot that several threads can read in any order."""

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copy bytes of the snapshot to `address`."""


def fill_from(
    jobs: Iterable[tuple[RandomAccess, Sequence[Place]]],
    pool: Executor,
    thread_count: int,
    landed: Callable[[int], object] = lambda size_bytes: None,
    deadline_s: float = math.inf,
) -> None:
    """Fill the places of every snapshot with threads of the pool. Blocks until done.

    Raises the ParamdError of a source, or DeadlineError if the monotonic clock has passed
    `deadline_s` before a part begins. The contents of the places are undefined after an error.
    """
    # Shared by the threads: `next` on a list iterator is atomic under the GIL.
    parts = iter([(source, part) for source, places in jobs for part in _parts(places)])
    failed = threading.Event()

    def work() -> None:
        scratch = Scratch()
        try:
            for source, part in parts:
                if failed.is_set():
                    return
                if time.monotonic() > deadline_s:
                    raise DeadlineError("not all bytes were copied in time; allow more (timeout=)")
                _fill(source, part, scratch)
                landed(part.size_bytes)
        except BaseException:
            failed.set()
            raise

    workers = [pool.submit(work) for _ in range(thread_count)]
    # No thread may still write when the caller frees the destination.
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
