"""Snapshots kept as bases: states that followers have, and want the changes since.

A base is a snapshot that needs no lease, found by its key and state. All followers of the same
spans share it. Bases have a separate budget: the least recently used one is dropped when there is
no room, and any that nobody requests within `IDLE_S`. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from paramd.memory.descriptors import pages
from paramd.state import StateName
from paramd_service.sidecar.pins import Keeping
from paramd_service.sidecar.snapshots.store import Key, Snapshot, SnapshotStore

IDLE_S = 600.0
"""How long an unused base is kept; a follower may want every hundredth step."""

State: TypeAlias = tuple[Key, StateName]
"""Source and spans of bytes, and their state."""


def state_of(snapshot: Snapshot) -> State:
    """The key that a filled snapshot is found by."""
    return snapshot.key, snapshot.state


class Bases(Keeping):
    """The bases of one attachment."""

    def __init__(
        self, store: SnapshotStore, *, budget_bytes: int, clock_ns: Callable[[], int]
    ) -> None:
        self.budget_bytes = budget_bytes
        self._store = store
        self._clock_ns = clock_ns
        # The least recently used one first.
        self._kept: dict[State, tuple[Snapshot, int]] = {}
        self._closed = False

    @property
    def size_bytes(self) -> int:
        return sum(pages(snapshot.size_bytes) for snapshot, _ in self._kept.values())

    @property
    def idle_bytes(self) -> int:
        """Bytes of bases that nobody holds besides."""
        kept = (snapshot for snapshot, _ in self._kept.values())
        return sum(pages(snapshot.size_bytes) for snapshot in kept if snapshot.holders == 1)

    def find(self, state: State) -> Snapshot | None:
        """The base of that state, with one more hold; None: it was dropped, or never kept."""
        found = self._kept.pop(state, None)
        if found is None:
            return None
        snapshot, _ = found
        self._kept[state] = snapshot, self._clock_ns()
        return self._store.hold(snapshot)

    def keep(self, snapshot: Snapshot) -> None:
        """Keep a filled snapshot as a base, if it fits at all."""
        state, size_bytes = state_of(snapshot), pages(snapshot.size_bytes)
        if (held := self.find(state)) is not None:
            self._store.drop(held)
            return
        # Closed: the attachment ended while its changes were compared.
        if (
            self._closed
            or not snapshot.shareable
            or not snapshot.size_bytes
            or size_bytes > self.budget_bytes
        ):
            return
        while self.size_bytes + size_bytes > self.budget_bytes:
            self._forget(next(iter(self._kept)))
        self._store.count_as_base(self._store.hold(snapshot), True)
        self._kept[state] = snapshot, self._clock_ns()

    def sweep(self) -> int | None:
        """Drop unused bases; return when to call again (None: none is kept)."""
        idle_ns, now_ns = int(IDLE_S * 1e9), self._clock_ns()
        for state in [s for s, (_, used_ns) in self._kept.items() if used_ns + idle_ns <= now_ns]:
            self._forget(state)
        return min((used_ns + idle_ns for _, used_ns in self._kept.values()), default=None)

    def drop_all(self) -> None:
        """Drop all bases: their followers get whole states next."""
        for state in list(self._kept):
            self._forget(state)

    def close(self) -> None:
        """Drop all bases, and keep no more."""
        self._closed = True
        self.drop_all()

    def _forget(self, state: State) -> None:
        snapshot, _ = self._kept.pop(state)
        # Leases on it count again from now on.
        self._store.count_as_base(snapshot, False)
        self._store.drop(snapshot)
