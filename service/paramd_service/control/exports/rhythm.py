"""When a schedule exports, and what of its exports is kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from paramd.errors import UsageError

MIN_EVERY_S = 1.0

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rhythm:
    """How often, and what stays."""

    every_steps: int | None = None
    """An export at (or soon after) every multiple of so many steps."""
    every_s: float | None = None
    """An export so many seconds after the last one began."""
    keep_last: int | None = None
    """The newest so many stay; None removes nothing."""
    keep_every: int | None = None
    """Beside them, every so many-th stays, counted from the first."""

    def __post_init__(self) -> None:
        if (self.every_steps is None) == (self.every_s is None):
            raise UsageError("every_steps, every_s: give exactly one of them")
        if self.every_steps is not None and self.every_steps < 1:
            raise UsageError(f"every_steps: {self.every_steps}; expected 1 or more")
        if self.every_s is not None and not self.every_s >= MIN_EVERY_S:
            raise UsageError(f"every_s: {self.every_s}; expected {MIN_EVERY_S} or more")
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: {value}; expected 1 or more")
        if self.keep_every is not None and self.keep_last is None:
            raise UsageError("keep_every: needs keep_last; without it everything is kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What a schedule has done."""

    step: int
    """Step of the last occasion, taken or skipped; of its making before that."""
    time_s: float
    """When that was, in seconds since the Unix epoch."""
    running: bool
    """Whether its last export is under way."""


class Due(Enum):
    """What to do now."""

    NOT_YET = "its time has not come"
    SKIP = "skipped: the previous export still runs"
    BEGIN = "due"


def due(rhythm: Rhythm, past: Past, *, step: int, now_s: float) -> Due:
    """What to do now. An occasion that comes while the previous export runs is skipped, not
    made up for: the caller notes it in `past` as it notes one that was taken.

    Args:
        step: The job's last finished update; -1 when not known.
    """
    if rhythm.every_steps is not None:
        came = step >= 0 and step // rhythm.every_steps > past.step // rhythm.every_steps
    else:
        assert rhythm.every_s is not None
        # A clock set back must not silence it for as long.
        came = not 0 <= now_s - past.time_s < rhythm.every_s
    if not came:
        return Due.NOT_YET
    return Due.SKIP if past.running else Due.BEGIN


@dataclass(frozen=True, slots=True)
class Kept(Generic[Key]):
    """An export that a schedule finished."""

    key: Key
    number: int
    """Which of the schedule's finished exports it was, from 0 on."""


def to_remove(rhythm: Rhythm, finished: Sequence[Kept[Key]]) -> list[Key]:
    """Which of them go, oldest first: neither among the newest `keep_last` nor a
    `keep_every`-th.

    Args:
        finished: Those of this schedule alone that are still there, oldest first.
    """
    if rhythm.keep_last is None:
        return []
    old = finished[: max(len(finished) - rhythm.keep_last, 0)]
    return [
        one.key for one in old if rhythm.keep_every is None or one.number % rhythm.keep_every != 0
    ]
