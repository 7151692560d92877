"""Memory of the gradient slots: which bytes of each slot's room have pages, and its program."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

from paramd.memory.control_page import Words
from paramd.memory.descriptors import PAGE, SparseMemory, reserved_bytes
from paramd.memory.gradient_program import Slot, covers, united
from paramd.memory.handover import GRADIENT_SLOTS
from paramd.memory.left import HEADROOM, Purpose, Room
from paramd_service.sidecar.ranges import Ranges

Spans = tuple[tuple[int, int], ...]


class SlotMemory:
    """Memory of all slots. `reserve`, `release` and `close` are slow: call off the event loop."""

    def __init__(
        self, descriptor: int, arena_bytes: int, page: Words, room: Room = HEADROOM
    ) -> None:
        """`page`: words of the control page. `room` grants the pages."""
        self._page = page
        self._memory = SparseMemory(descriptor, room, Purpose.GRADIENTS)
        self.slots = [
            Slot(self._memory.buffer, arena_bytes, index) for index in range(GRADIENT_SLOTS)
        ]
        self._held: list[Spans] = [()] * GRADIENT_SLOTS
        self._tails = [False] * GRADIENT_SLOTS
        self._programs: list[tuple[Spans, int] | None] = [None] * GRADIENT_SLOTS
        self.inherited = reserved_bytes(descriptor) > 0
        """An earlier sidecar has left pages in some room, which nobody reads any more."""

    @property
    def reserved(self) -> bool:
        """Whether any room has pages."""
        return any(self._tails) or self.inherited

    def held_bytes(self, rooms: Sequence[int]) -> int:
        """Bytes of these rooms that have pages; what an earlier sidecar left only if all are asked
        for."""
        if self.inherited and len(rooms) == GRADIENT_SLOTS:
            return reserved_bytes(self._memory.descriptor)
        held = [end - begin for index in rooms for begin, end in self._held[index]]
        slots = [self.slots[index] for index in rooms if self._tails[index]]
        return sum(held) + sum(slot.end_bytes - slot.tail_begin_bytes for slot in slots)

    def holds(self, index: int, spans: Spans) -> bool:
        """Whether all spans of a room have pages."""
        return self._tails[index] and covers(self._held[index], page_spans(spans))

    def reserve(self, index: int, spans: Spans) -> None:
        """Populate spans of a room, and its tail.

        Raises:
            ExhaustedError: If the machine does not have that much memory.
        """
        slot = self.slots[index]
        if not self._tails[index]:
            self._memory.populate(slot.tail_begin_bytes, slot.end_bytes)
            self._tails[index] = True
        for span in page_spans(spans):
            # Not what is there: a refusal gives the whole range back, and the trainer would write
            # into the hole.
            for begin, end in Ranges(*self._held[index]).missing(*span):
                self._memory.populate(slot.begin_bytes + begin, slot.begin_bytes + end)
                self._held[index] = united([*self._held[index], (begin, end)])

    def program(self, index: int, spans: Spans) -> int:
        """Write the program unless it was written already; return its version."""
        known = self._programs[index]
        if known is None or known[0] != spans or self.slots[index].version() != known[1]:
            known = (spans, self.slots[index].write_program(spans, self._page))
            self._programs[index] = known
        return known[1]

    def room(self, index: int, begin: int, end: int) -> memoryview:
        """Bytes of a room, addressed by their place in the arena."""
        base = self.slots[index].begin_bytes
        return self._memory.buffer[base + begin : base + end]

    def address(self, index: int) -> int:
        """Address of a room in this process."""
        return self._memory.address + self.slots[index].begin_bytes

    def release(self, rooms: Sequence[int]) -> None:
        """Release all pages of these rooms, which may not be armed."""
        for index in rooms:
            slot = self.slots[index]
            self._held[index], self._tails[index], self._programs[index] = (), False, None
            with suppress(OSError):
                self._memory.release(slot.begin_bytes, slot.end_bytes)
        if len(rooms) == GRADIENT_SLOTS:
            self.inherited = False

    def close(self) -> None:
        """Release all pages and unmap."""
        self.release(range(GRADIENT_SLOTS))
        for slot in self.slots:
            slot.close()
        self._memory.close()


class Places:
    """Maps offsets in concatenated spans to arena bytes."""

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
        first = begin + offset - self._offsets[at]
        return first if first + size_bytes <= end else None


def page_spans(spans: Sequence[tuple[int, int]]) -> Spans:
    """The whole pages that spans touch."""
    return united([(begin // PAGE * PAGE, -(-end // PAGE) * PAGE) for begin, end in spans])
