"""Sets of numbers as half-open ranges: which bytes are free, and which have pages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

Range = tuple[int, int]


class Ranges:
    """A set of numbers as sorted ranges that neither overlap nor touch."""

    def __init__(self, *ranges: Range) -> None:
        self._ranges: list[Range] = []
        for begin, end in ranges:
            self.add(begin, end)

    def __iter__(self) -> Iterator[Range]:
        return iter(tuple(self._ranges))

    @property
    def size(self) -> int:
        """Count of numbers in the set."""
        return sum(end - begin for begin, end in self._ranges)

    def add(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        first = bisect_left(self._ranges, begin, key=lambda one: one[1])
        last = first
        while last < len(self._ranges) and self._ranges[last][0] <= end:
            begin, end = min(begin, self._ranges[last][0]), max(end, self._ranges[last][1])
            last += 1
        self._ranges[first:last] = [(begin, end)]

    def remove(self, begin: int, end: int) -> None:
        """Remove [begin, end), as far as it is in the set."""
        left = []
        for low, high in self._ranges:
            left += [(low, min(high, begin)), (max(low, end), high)]
        self._ranges = [(low, high) for low, high in left if low < high]

    def within(self, begin: int, end: int) -> list[Range]:
        """The parts of [begin, end) that are in the set."""
        parts = [(max(low, begin), min(high, end)) for low, high in self._ranges]
        return [(low, high) for low, high in parts if low < high]

    def missing(self, begin: int, end: int) -> list[Range]:
        """The parts of [begin, end) that are not in the set."""
        rest = Ranges((begin, end))
        for low, high in self.within(begin, end):
            rest.remove(low, high)
        return list(rest)

    def first_fit(self, size: int) -> int | None:
        """Begin of the first range of at least `size`; None if there is none."""
        return next((low for low, high in self._ranges if high - low >= size), None)


def place_in(spans: Sequence[tuple[int, int]]) -> Callable[[int, int], int | None]:
    """(arena byte, size) -> first byte in the concatenated spans; None: not all in one span."""
    begins = [begin for begin, _ in spans]
    offsets = list(accumulate((end - begin for begin, end in spans), initial=0))

    def place(at: int, size: int) -> int | None:
        index = bisect_right(begins, at) - 1
        if index < 0 or at + size > spans[index][1]:
            return None
        return offsets[index] + at - begins[index]

    return place
