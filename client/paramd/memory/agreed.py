"""The last requests that the trainers agreed on, kept in the control page by its trainer.

So that whoever asks late, of a sidecar that was respawned meanwhile, still hears the truth:
numbers only rise, so one below the last agreed that is not among these never was agreed.
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
    """The trainer's side, before it writes AGREED: `number` is the nth request agreed."""
    words[_BEGIN + nth % KEPT] = number


def note_failed(words: Words, nth: int, number: int) -> None:
    """The trainer's side: an edit could not be applied on this rank, wholly or at all."""
    words[_BEGIN + nth % KEPT] = -number


def past_of(words: Words, number: int) -> Past:
    """What became of a request above 0 and below AGREED; read AGREED first."""
    kept = [words[_BEGIN + index] for index in range(KEPT)]
    if number in kept:
        return Past.DONE
    if -number in kept:
        return Past.FAILED
    # 0 stands where none has been yet: then nothing has been forgotten.
    return Past.NEVER if min(map(abs, kept)) < number else Past.FORGOTTEN
