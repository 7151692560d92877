"""What became of a ready edit, told from the control page alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from paramd.memory.control_page import Word
from paramd_service.sidecar.edit_entry import Entry
from paramd_service.sidecar.owner import Ownership

WITHDRAWN_NS = 20_000_000
"""How long a request must stand in the page no more before PROMISED is believed: twice what
withdrawing waits."""


class Fate(Enum):
    """Of an edit that is ready for request n."""

    APPLIED = "the trainer says that it has applied n"
    OPEN = "n may have been agreed, or may yet be"
    NEVER = "this rank will never apply n"


def fate(entry: Entry, words: Sequence[int], *, ended: Ownership | None, now_ns: int) -> Fate:
    """The fate of a READY edit; remembers in `unready_ns` since when n stands no more.

    Args:
        words: Of the control page.
        ended: How the trainer ended; None while it lives.
        now_ns: CLOCK_MONOTONIC.
    """
    number, token = entry.boundary, entry.token
    if (words[Word.EDIT_APPLIED], words[Word.EDIT_TOKEN]) == (number, token):
        return Fate.APPLIED
    agreed = words[Word.AGREED]
    if agreed == number and words[Word.AGREED_TOKEN] != token:
        return Fate.NEVER
    if words[Word.EDIT_AGREED] == number:
        # Being applied, or its trainer ended in it: then the rank is torn.
        return Fate.OPEN
    if ended is not None or agreed > number:
        return Fate.NEVER
    if agreed == number:
        return Fate.OPEN
    if words[Word.READY] == number:
        entry.unready_ns = 0
        return Fate.OPEN
    entry.unready_ns = entry.unready_ns if entry.unready_ns else now_ns
    if now_ns - entry.unready_ns < WITHDRAWN_NS or words[Word.PROMISED] == number:
        return Fate.OPEN
    return Fate.NEVER
