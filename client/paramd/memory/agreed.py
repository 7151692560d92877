"""The last requests the trainers agreed on, kept in the control page by its trainer.

They let even a respawned sidecar tell the fate of a request: numbers only rise, so one below
the last agreed that is not among these was never agreed.
"""

from __future__ import annotations

from enum import Enum

from paramd.memory.control_page import Words

_BEGIN = 128
KEPT = 64


class Past(Enum):
    """What became of a request below the last one agreed."""

    DONE = "agreed and done"
    FAILED = "an edit that was agreed and failed on this rank"
    NEVER = "never agreed"
    FORGOTTEN = "too long ago to tell"


def note_agreed(words: Words, nth: int, number: int) -> None:
    """Trainer's side, before it writes AGREED: record `number` as the nth agreed request."""
    words[_BEGIN + nth % KEPT] = number


def note_failed(words: Words, nth: int, number: int) -> None:
    """Trainer's side: record that an edit failed on this rank, wholly or in part."""
    words[_BEGIN + nth % KEPT] = -number


def past_of(words: Words, number: int) -> Past:
    """The fate of a request above 0 and below AGREED; read AGREED first."""
    kept = [words[_BEGIN + index] for index in range(KEPT)]
    if number in kept:
        return Past.DONE
    if -number in kept:
        return Past.FAILED
    # A 0 is a slot never used, so nothing has been forgotten yet.
    return Past.NEVER if min(map(abs, kept)) < number else Past.FORGOTTEN
