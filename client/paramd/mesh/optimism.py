"""When to try what the ranks have, and when to ask for a boundary at once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Optimism:
    """Whether to try what the ranks have before asking for a boundary.

    Each failed try costs a round of copies. So after steps differed, the boundary is
    asked for at once during a while that doubles as tries keep failing.
    """

    first_pause_s: float = 0.5
    last_pause_s: float = 8.0
    _pause_s: float = 0.0
    _until_s: float = field(default=float("-inf"))

    def tries(self, now_s: float) -> bool:
        """Whether to try at `now_s`."""
        return now_s >= self._until_s

    def differed(self, now_s: float) -> None:
        """A try ended with different steps."""
        self._pause_s = min(max(2 * self._pause_s, self.first_pause_s), self.last_pause_s)
        self._until_s = now_s + self._pause_s

    def agreed(self) -> None:
        """A try ended with equal steps."""
        self._pause_s = 0.0
        self._until_s = float("-inf")
