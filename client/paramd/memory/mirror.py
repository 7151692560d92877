"""Mirrored arenas: copies of parameters that stay in the trainer's own memory.

The words: MIRRORED says that the arena is such a copy, and MIRRORED_FOR which boundary
request it was last refreshed for. Only a snapshot of that very request may be taken from it;
its other bytes are of earlier steps. While the trainer refreshes it, SEQ is odd.

What a request wants of the arena stands in its ARGUMENT: one range of whole pages that holds
all spans asked for, so that the trainer need not copy everything for a reader of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from paramd.memory.control_page import Word, Words

_PAGE_BYTES = 4096
_BITS = 31
_MASK = (1 << _BITS) - 1


def is_mirror(words: Words) -> bool:
    """Whether the arena is a copy, which only a boundary that asks for it refreshes."""
    return words[Word.MIRRORED] != 0


def pack_wanted(spans: Iterable[tuple[int, int]]) -> int:
    """The ARGUMENT for half-open byte spans of the arena; 0 when there are none.

    Arenas above 8 TiB have no such word: 0 then too, which wants nothing, so that the
    request is missed and never answered with other bytes.
    """
    found = list(spans)
    if not found:
        return 0
    begin = min(begin for begin, _ in found) // _PAGE_BYTES
    end = -(-max(end for _, end in found) // _PAGE_BYTES)
    return begin << _BITS | end if end <= _MASK else 0


def unpack_wanted(argument: int) -> tuple[int, int]:
    """The byte range [begin, end) that `pack_wanted` told."""
    return (argument >> _BITS) * _PAGE_BYTES, (argument & _MASK) * _PAGE_BYTES
