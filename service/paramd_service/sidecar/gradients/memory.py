"""The sidecar's side of the gradient slots' memory: what has pages, what is in a room."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

from paramd.memory.gradient_program import Slot, covers, united
from paramd.memory.shared import GRADIENT_SLOTS
from paramd.memory.sparse import PAGE, SparseMemory

Spans = tuple[tuple[int, int], ...]

# madvise(2): prefault pages for writing (Linux 5.14).
_MADV_POPULATE_WRITE = 23

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SlotMemory:
    """All slots. `reserve`, `release` and `close` are slow: call them off the event loop."""

    def __init__(self, descriptor: int, arena_bytes: int) -> None:
        self._memory = SparseMemory(descriptor)
        self._arena_bytes = arena_bytes
        self.slots = [
            Slot(self._memory.buffer, arena_bytes, index) for index in range(GRADIENT_SLOTS)
        ]
        self._held: list[Spans] = [()] * GRADIENT_SLOTS
        self._tails = [False] * GRADIENT_SLOTS
        self._programs: list[tuple[Spans, int] | None] = [None] * GRADIENT_SLOTS

    @property
    def reserved(self) -> bool:
        """Whether any room has pages."""
        return any(self._tails)

    def holds(self, index: int, spans: Spans) -> bool:
        """Whether all spans of a room have pages."""
        return self._tails[index] and covers(self._held[index], page_spans(spans))

    def reserve(self, index: int, spans: Spans) -> None:
        """Populate spans of a room, and its tail.

        Raises:
            ExhaustedError: the machine does not have that much memory.
        """
        slot = self.slots[index]
        if not self._tails[index]:
            self._populate(slot.tail_begin_bytes, slot.end_bytes)
            self._tails[index] = True
        for span in page_spans(spans):
            if not covers(self._held[index], (span,)):
                self._populate(slot.begin_bytes + span[0], slot.begin_bytes + span[1])
                self._held[index] = united([*self._held[index], span])

    def program(self, index: int, spans: Spans) -> int:
        """Write the program unless it is already there; return its version."""
        known = self._programs[index]
        if known is None or known[0] != spans or self.slots[index].version() != known[1]:
            known = (spans, self.slots[index].write_program(spans))
            self._programs[index] = known
        return known[1]

    def room(self, index: int, begin: int, end: int) -> memoryview:
        """Bytes of a room, addressed by their place in the arena."""
        base = self.slots[index].begin_bytes
        return self._memory.buffer[base + begin : base + end]

    def address(self, index: int) -> int:
        """Address of a room in this process."""
        return self._memory.address + self.slots[index].begin_bytes

    def release(self) -> None:
        """Release all pages; no slot may be armed."""
        self._held = [()] * GRADIENT_SLOTS
        self._tails = [False] * GRADIENT_SLOTS
        self._programs = [None] * GRADIENT_SLOTS
        with suppress(OSError):
            self._memory.release(0, self._memory.size_bytes)

    def close(self) -> None:
        """Release all pages and unmap."""
        self.release()
        for slot in self.slots:
            slot.close()
        self._memory.close()

    def _populate(self, begin: int, end: int) -> None:
        self._memory.reserve(begin, end)
        # Spares the first copy the page faults; on older kernels it still takes them.
        _madvise(self._memory.address + begin, end - begin, _MADV_POPULATE_WRITE)


class Places:
    """Where bytes of concatenated spans lie in the arena."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        lengths = [end - begin for begin, end in spans]
        self._offsets = list(accumulate(lengths, initial=0))

    @property
    def size_bytes(self) -> int:
        return self._offsets[-1]

    def arena_byte(self, offset: int, size_bytes: int) -> int | None:
        """First arena byte of a range of the concatenation; None unless a single span has it."""
        at = bisect_right(self._offsets, offset) - 1
        if at < 0 or at >= len(self._spans):
            return None
        begin, end = self._spans[at]
        found = begin + offset - self._offsets[at]
        return found if found + size_bytes <= end else None


def page_spans(spans: Sequence[tuple[int, int]]) -> Spans:
    """The whole pages that spans touch."""
    return united([(begin // PAGE * PAGE, -(-end // PAGE) * PAGE) for begin, end in spans])
