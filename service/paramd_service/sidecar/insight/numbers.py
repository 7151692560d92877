"""The numbers that a training script logs, as many as memory is set aside for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_KEPT = 10_000
"""Entries kept; the oldest go first. One of five numbers takes about a kilobyte."""

MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One call of `attachment.log`."""

    number: int
    """Counts entries of this sidecar from 1."""
    step: int
    time_s: float
    """Seconds since the Unix epoch, by the trainer's clock."""
    values: Mapping[str, float]


class LoggedNumbers:
    """Ring of entries."""

    def __init__(self) -> None:
        self._kept: deque[LogEntry] = deque(maxlen=MAX_KEPT)
        self.count = 0
        """Entries ever taken in."""

    def add(self, entries: Iterable[Any]) -> None:
        """Take in [step, time_s, {name: value}] as the trainer sent them; others are ignored."""
        for entry in entries:
            try:
                step, time_s, values = entry
                numbers = {str(n)[:64]: float(v) for n, v in list(values.items())[:MAX_NAMES]}
                found = LogEntry(self.count + 1, int(step), float(time_s), numbers)
            except (TypeError, ValueError, AttributeError, OverflowError):
                continue
            if math.isfinite(found.time_s):
                self.count += 1
                self._kept.append(found)

    def after(self, number: int, limit: int) -> list[LogEntry]:
        """The oldest `limit` entries above `number` that are still kept."""
        if not self._kept or number >= self.count:
            return []
        skipped = max(number - self._kept[0].number + 1, 0)
        kept = list(self._kept)
        return kept[skipped : skipped + limit]
