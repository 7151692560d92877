"""The last values of a series, which new ones are judged by."""

from __future__ import annotations

from collections import deque


class Known:
    """Values and their steps, oldest first."""

    def __init__(self, most: int) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def steps(self) -> list[int]:
        """Steps of the values."""
        return [step for step, _ in self._values]

    @property
    def values(self) -> list[float]:
        """The values."""
        return [value for _, value in self._values]

    def add(self, step: int, value: float) -> None:
        """Add the newest value."""
        self._values.append((step, value))

    def rewind(self, step: int) -> None:
        """Drop what came after this step. After a rollback steps come again, and values of a later
        time are not their past."""
        while self._values and self._values[-1][0] > step:
            self._values.pop()
