"""Mirrored arenas: copies of parameters that stay in the trainer's own memory.

The words: MIRRORED says that the arena is such a copy, MIRRORED_FOR which boundary request it
was last refreshed for, MIRRORED_STEP and MIRRORED_EDITS of which state. Only a snapshot of
that very request may be taken from it; its other bytes are of earlier steps.

The trainer writes MIRRORED_FOR = 0 before it writes to the arena and n after it; numbers never
come twice. So a copy during which MIRRORED_FOR was n all the time is whole, whatever the
training did meanwhile: an update does not touch the arena and waits for no copy.

What a request wants of the arena stands in its ARGUMENT: one range of whole pages that holds
all spans asked for, so that the trainer need not copy everything for a reader of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from paramd.memory.control_page import Word, Words

_PAGE_BYTES = 4096
_BITS = 31
_MASK = (1 << _BITS) - 1
_NOTHING = 1 << _BITS | 1
"""An empty range: no bytes are wanted, but which state it is."""


def is_mirror(words: Words) -> bool:
    """Whether the arena is a copy, which only a boundary that asks for it refreshes."""
    return words[Word.MIRRORED] != 0


def pack_wanted(spans: Iterable[tuple[int, int]]) -> int:
    """The ARGUMENT for half-open byte spans of the arena, perhaps none.

    Arenas above 8 TiB have no such word: 0 then, which no trainer answers, so that the
    request is missed and never filled with other bytes.
    """
    found = list(spans)
    if not found:
        return _NOTHING
    begin = min(begin for begin, _ in found) // _PAGE_BYTES
    end = -(-max(end for _, end in found) // _PAGE_BYTES)
    return begin << _BITS | end if end <= _MASK else 0


def unpack_wanted(argument: int) -> tuple[int, int]:
    """The byte range [begin, end) that `pack_wanted` told."""
    return (argument >> _BITS) * _PAGE_BYTES, (argument & _MASK) * _PAGE_BYTES
