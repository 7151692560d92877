"""Mirrored arenas: copies of parameters that stay in the trainer's own memory.

The words: MIRRORED says that the arena is such a copy, MIRRORED_FOR names the boundary request
it was last refreshed for, MIRRORED_STEP and MIRRORED_EDITS the state. It may serve a snapshot
of that request only; its other bytes date from earlier steps.

The trainer writes MIRRORED_FOR = 0 before it writes to the arena and n afterwards; numbers are
never reused. So a copy throughout which MIRRORED_FOR was n is consistent, whatever the training
did meanwhile: updates do not touch the arena and wait for no copy.

A request's ARGUMENT is one range of whole pages that holds all spans asked for, so that the
trainer need not copy everything for a reader of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from paramd.memory.control_page import Word, Words

_PAGE_BYTES = 4096
_BITS = 31
_MASK = (1 << _BITS) - 1
_NOTHING = 1 << _BITS | 1
"""An empty range: asks only which state it is."""


def is_mirror(words: Words) -> bool:
    """Whether the arena is a copy, refreshed only at boundaries that ask for it."""
    return words[Word.MIRRORED] != 0


def pack_wanted(spans: Iterable[tuple[int, int]]) -> int:
    """The ARGUMENT for half-open byte spans of the arena, possibly none.

    Ranges beyond 8 TiB do not fit: they give 0, which no trainer answers, so the request is
    missed rather than filled with the wrong bytes.
    """
    found = list(spans)
    if not found:
        return _NOTHING
    begin = min(begin for begin, _ in found) // _PAGE_BYTES
    end = -(-max(end for _, end in found) // _PAGE_BYTES)
    return begin << _BITS | end if end <= _MASK else 0


def unpack_wanted(argument: int) -> tuple[int, int]:
    """The byte range [begin, end) encoded by `pack_wanted`."""
    return (argument >> _BITS) * _PAGE_BYTES, (argument & _MASK) * _PAGE_BYTES
