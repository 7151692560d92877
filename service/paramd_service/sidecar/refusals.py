"""Calls that this sidecar refused: how many, and the last one's reason.

The sidecar keeps no audit. Its reports carry these numbers, and the control plane records them.
"""

from __future__ import annotations

MAX_CHARS = 256


class Refusals:
    """Counts on the event loop's thread."""

    def __init__(self) -> None:
        self.count = 0
        """Since the process began."""
        self.last = ""
        """Method and reason of the last one; empty before the first."""

    def saw(self, method: str, reason: str) -> None:
        """One call was refused. Never fails, whatever the caller wrote."""
        self.count += 1
        # What a caller wrote may stand in the reason: only what any log can show.
        told = f"{method[:MAX_CHARS]}: {reason}"[:MAX_CHARS]
        self.last = told.encode("ascii", "replace").decode()
