"""Which rank sends which elements, in which order. Pure: every rank computes the same plan.

A *part* is one region of one tensor. A *stream* is what one rank sends: parts, or runs of their
elements, laid end to end. Streams are about equally long whatever the sharding, since a part
held by several ranks is divided among them. All are cut at the same byte offsets, so one
collective moves the next span of every stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 16
"""Runs and spans begin at multiples of this, so that no element is cut."""

MIN_DIVIDED_BYTES = 1 << 16
"""Smaller parts are sent by one holder; dividing them saves nothing."""

MIN_SPAN_BYTES = 1 << 18
MAX_SPAN_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Part:
    """One region to send."""

    numel: int
    item_bytes: int
    senders: tuple[int, ...]
    """Ranks able to send it, ascending."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `[begin, end)` of a part, row-major, at a place in a stream."""

    part: int
    begin: int
    end: int
    at_bytes: int
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        return (self.end - self.begin) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements `[begin, end)` of a part, at byte `at` of a span."""

    part: int
    begin: int
    end: int
    at: int


def plan_streams(parts: Sequence[Part], world_size: int) -> list[list[Run]]:
    """The stream of every rank."""
    streams: list[list[Run]] = [[] for _ in range(world_size)]
    ends = [0] * world_size
    for index, part in enumerate(parts):
        for rank, begin, end in _shares(part, ends):
            run = Run(index, begin, end, ends[rank], part.item_bytes)
            streams[rank].append(run)
            ends[rank] = _aligned(run.at_bytes + run.size_bytes)
    return streams


def _shares(part: Part, ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    size_bytes = part.numel * part.item_bytes
    if len(part.senders) == 1 or size_bytes < MIN_DIVIDED_BYTES:
        yield min(part.senders, key=lambda rank: ends[rank]), 0, part.numel
        return
    step = -(-part.numel // len(part.senders))
    for index, rank in enumerate(part.senders):
        begin, end = min(index * step, part.numel), min((index + 1) * step, part.numel)
        if begin < end:
            yield rank, begin, end


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def stream_bytes(stream: Sequence[Run]) -> int:
    """Length of a stream."""
    return stream[-1].at_bytes + stream[-1].size_bytes if stream else 0


def span_bytes(
    world_size: int, budget_bytes: int, longest_bytes: int, max_bytes: int = MAX_SPAN_BYTES
) -> int:
    """Bytes of each stream moved by one collective, at most `max_bytes`.

    `world_size + 1` spans are in memory at once; they stay within the budget, except for a
    floor that keeps the number of collectives down.
    """
    wanted = min(budget_bytes // (world_size + 1), max_bytes, longest_bytes)
    floor = min(MIN_SPAN_BYTES, longest_bytes)
    return max(_aligned(max(wanted, floor)), ALIGNMENT_BYTES)


def spans(stream: Iterable[Run], size_bytes: int, count: int) -> list[list[Cut]]:
    """The stream cut into `count` spans of `size_bytes`; those past its end are empty."""
    found: list[list[Cut]] = [[] for _ in range(count)]
    for run in stream:
        item, at, begin = run.item_bytes, run.at_bytes, run.begin
        while begin < run.end:
            span, offset = divmod(at, size_bytes)
            numel = min(run.end - begin, (size_bytes - offset) // item)
            found[span].append(Cut(run.part, begin, begin + numel, offset))
            begin, at = begin + numel, at + numel * item
    return found
