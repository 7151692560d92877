"""How much edits may take of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from paramd.errors import ExhaustedError


@dataclass(frozen=True, kw_only=True)
class EditLimits:
    """Limits of one possession."""

    budget_bytes: int
    """Most bytes that edits which are not applied may take together; above 0."""
    undo_budget_bytes: int
    """Most bytes kept for undoing applied edits; 0 or more."""
    expiry_s: float
    """How long a staged edit that nobody touches is kept; above 0."""
    max_edits: int = 256
    """Edits that may be staged at once; 1 or more."""

    def check(self, size_bytes: int, *, staged_bytes: int) -> None:
        """Returns when an edit of that size has room. Raises ExhaustedError."""
        if staged_bytes + size_bytes > self.budget_bytes:
            raise ExhaustedError(
                f"the edit takes {size_bytes:,} bytes on this rank, {staged_bytes:,} of "
                f"{self.budget_bytes:,} are taken by others that are staged; make it smaller, or "
                "commit or abort those"
            )
