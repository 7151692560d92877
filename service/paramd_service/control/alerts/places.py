"""Where two replicas differ: narrows a difference down by digests of ever smaller parts.

Nothing but digests is asked for; at the end a byte is known by its digest, of which there
are 256. What is told is which bits differ, never a value: alerts go to logs and webhooks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import xxhash

from paramd_service.control.alerts.drift import Difference, ReplicaGroup

Spans: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]
"""Half-open byte ranges of arenas, sorted and disjoint, by rank."""

PARTS = 64
"""Parts that a difference is cut into at a time: 64 MiB are four rounds."""

_BYTE_OF = {xxhash.xxh3_128_digest(bytes([value])): value for value in range(256)}


class Digests(Protocol):
    """Pinned bytes of several ranks at one step."""

    async def ask(self, rank: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Digests of byte ranges of one rank's arena."""


def spans_of(groups: Sequence[ReplicaGroup]) -> Spans:
    """What has to be pinned of each rank: the groups' pieces, merged where they touch."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    for group in groups:
        for rank, begin in group.begins.items():
            pieces.setdefault(rank, []).append((begin, begin + group.size_bytes))
    spans: dict[int, list[tuple[int, int]]] = {}
    for rank, found in pieces.items():
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(found):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        spans[rank] = merged
    return spans


def place_of(spans: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """The function from a byte of the arena to its offset in the snapshot of `spans`."""
    begins = [begin for begin, _ in spans]
    offsets = [0]
    for begin, end in spans:
        offsets.append(offsets[-1] + end - begin)

    def offset_of(at: int) -> int:
        index = bisect_right(begins, at) - 1
        return offsets[index] + at - begins[index]

    return offset_of


async def ask_where(digests: Digests, difference: Difference) -> str:
    """The first differing element and how many of its bits differ, in words.

    The first rank that differs is held against the first one that it differs from.
    """
    group = difference.group
    one = difference.ranks[0]
    others = [rank for rank in group.begins if rank != one]
    # Without a majority all ranks are named, and some may yet be equal to the first.
    for other in others:
        if difference.majority and other in difference.ranks:
            continue
        found = await _first_differing_byte(digests, group, one, other)
        if found is not None:
            return await _told(digests, group, one, other, found)
    return ""


async def _first_differing_byte(
    digests: Digests, group: ReplicaGroup, one: int, other: int
) -> int | None:
    begin, end = 0, group.size_bytes
    while True:
        parts = _cut(begin, end)
        equal = [
            a == b
            for a, b in zip(
                await _digests(digests, group, one, parts),
                await _digests(digests, group, other, parts),
                strict=True,
            )
        ]
        if all(equal):
            return None
        begin, end = parts[equal.index(False)]
        if end - begin == 1:
            return begin


async def _told(digests: Digests, group: ReplicaGroup, one: int, other: int, byte: int) -> str:
    element = byte // group.item_bytes
    first = element * group.item_bytes
    parts = [(at, at + 1) for at in range(first, first + group.item_bytes)]
    ours = await _digests(digests, group, one, parts)
    theirs = await _digests(digests, group, other, parts)
    bits = [
        8 * at + bit
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True))
        for bit in range(8)
        if (_BYTE_OF[a] ^ _BYTE_OF[b]) >> bit & 1
    ]
    what = f"bit {bits[0]}" if len(bits) == 1 else f"{len(bits)} bits"
    return (
        f"the first difference of rank {one} from rank {other} is {what} of element {element} "
        "of its piece"
    )


async def _digests(
    digests: Digests, group: ReplicaGroup, rank: int, parts: Sequence[tuple[int, int]]
) -> list[bytes]:
    base = group.begins[rank]
    return await digests.ask(rank, [(base + begin, base + end) for begin, end in parts])


def _cut(begin: int, end: int) -> list[tuple[int, int]]:
    """[begin, end) in at most `PARTS` parts of equal size, the last one perhaps smaller."""
    size = max(1, -(-(end - begin) // PARTS))
    return [(at, min(at + size, end)) for at in range(begin, end, size)]
