"""Who is charged for how much of the snapshot budget.

A third of the budget is reserved for the control plane (exports included) and the owner; one
token gets at most half of the rest. Each holder of a shared snapshot is charged in full, but it
counts once towards the total of all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from paramd.errors import ExhaustedError
from paramd_service.shares import Who
from paramd_service.sidecar.snapshots.blocks import Snapshot


class Charges:
    """Who holds which snapshots, by source. Event loop only."""

    def __init__(self, budget_bytes: Callable[[int], int]) -> None:
        """`budget_bytes(source)`: the budget of a source."""
        self._budget_bytes = budget_bytes
        self._held: dict[Snapshot, Counter[Who]] = {}
        self._sizes: dict[Snapshot, int] = {}
        self._taken_bytes: Counter[tuple[int, Who]] = Counter()
        self._token_bytes: Counter[int] = Counter()

    def share_bytes(self, source: int) -> int:
        """Most bytes of a source's snapshots that one token may hold."""
        return self._budget_bytes(source) // 3

    def taken_bytes(self, source: int, who: Who) -> int:
        """Bytes that `who` holds of a source."""
        return self._taken_bytes[source, who]

    def check(self, who: Who, source: int, needed_bytes: int, *, is_new: bool = True) -> None:
        """Check that `who` may hold that much more; `is_new`: no token holds it yet.

        Raises:
            ExhaustedError: this token's share, or that of all tokens, is used up.
        """
        if who is None:
            return
        share_bytes, mine = self.share_bytes(source), self.taken_bytes(source, who)
        if mine + needed_bytes > share_bytes:
            raise ExhaustedError(
                f"a snapshot of {needed_bytes:,} bytes does not fit: your token holds {mine:,} of "
                f"its share of {share_bytes:,} bytes, a third of this sidecar's snapshot budget. "
                "Release some, ask for fewer tensors, or have the budget raised "
                "(PARAMD_BUDGET_BYTES)"
            )
        for_tokens, others = 2 * share_bytes, self._token_bytes[source]
        if is_new and others + needed_bytes > for_tokens:
            raise ExhaustedError(
                f"a snapshot of {needed_bytes:,} bytes does not fit: tokens hold {others:,} of "
                f"{for_tokens:,} bytes, and the rest of the snapshot budget is kept for the "
                "control plane and the owner; try again when other snapshots are released"
            )

    def check_more(self, who: Who, snapshot: Snapshot, size_bytes: int) -> None:
        """As `check`, for a lease on an existing snapshot."""
        held = self._held.get(snapshot, Counter())
        if not held[who]:
            is_new = not any(other is not None for other in held)
            self.check(who, snapshot.key.source, size_bytes, is_new=is_new)

    def add(self, who: Who, snapshot: Snapshot, size_bytes: int) -> None:
        """Add one hold."""
        held = self._held.setdefault(snapshot, Counter())
        size_bytes = self._sizes.setdefault(snapshot, size_bytes)
        source = snapshot.key.source
        if who is not None and not any(other is not None for other in held):
            self._token_bytes[source] += size_bytes
        held[who] += 1
        if held[who] == 1:
            self._taken_bytes[source, who] += size_bytes

    def remove(self, who: Who, snapshot: Snapshot) -> None:
        """Remove one hold."""
        held, source = self._held[snapshot], snapshot.key.source
        held[who] -= 1
        if held[who]:
            return
        del held[who]
        size_bytes = self._sizes[snapshot]
        _subtract(self._taken_bytes, (source, who), size_bytes)
        if who is not None and not any(other is not None for other in held):
            _subtract(self._token_bytes, source, size_bytes)
        if not held:
            del self._held[snapshot], self._sizes[snapshot]


def _subtract(counter: Counter[Any], key: object, amount: int) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
