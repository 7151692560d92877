"""Snapshots and their leases: who holds which bytes of which step, within a byte budget.

A snapshot's memory goes this way:

    free --reserve--> EMPTY --arm--> PENDING --filled--> FILLED --last lease ends--> kept
     ^                                                                                 |
     +------------------- taken for another snapshot, or idle too long ----------------+

Kept memory still knows its bytes: an equal request at the same step gets them again, and
a torn rank can still serve the last ones under their own step. Memory that a client maps
at that moment is forgotten instead (the kernel keeps it for that client alone).

All methods run on the event loop's thread; nothing here blocks.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from paramd.errors import ConflictError, ExhaustedError, NotFoundError
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.blocks import Block, BlockMaker, block_bytes
from paramd_service.sidecar.snapshot import Fill, Key, Lease, Snapshot

MAX_LEASES = 4096
"""More leases than that are refused: each is small, but not free."""

# A kept block serves a smaller request when at most this part of it stays unused.
_WASTE_DIVISOR = 4

_BUDGETS: dict[int, int] = {pb.SOURCE_MOMENTS: 4}
"""Budgets that a source has: optimizer state has several tensors for each parameter."""


@dataclass(eq=False, slots=True)
class _Kept:
    block: Block
    since_ns: int
    snapshot: Snapshot | None = field(default=None)


class SnapshotStore:
    """Leases, budget and kept memory of one rank's snapshots in one epoch."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        blocks: BlockMaker,
        clock_ns: Callable[[], int],
        idle_memory_s: float,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._blocks = blocks
        self._clock_ns = clock_ns
        self.idle_memory_s = idle_memory_s
        """How long freed memory is kept."""
        self._idle_ns = int(idle_memory_s * 1e9)
        self._leases: dict[str, Lease] = {}
        self._live: set[Snapshot] = set()
        self._live_bytes: Counter[int] = Counter()
        self._kept: list[_Kept] = []
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of snapshots that somebody holds."""
        return self._live_bytes.total()

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory kept for the next snapshot."""
        return sum(kept.block.size_bytes for kept in self._kept)

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    def leases(self, now_ns: int) -> list[Lease]:
        """Leases that have not ended, by what is left of them."""
        alive = [lease for lease in self._leases.values() if lease.expires_ns > now_ns]
        return sorted(alive, key=lambda lease: lease.expires_ns)

    def find(
        self, key: Key, *, step: int | None = None, edits: int | None = None
    ) -> Snapshot | None:
        """A filled snapshot of `key` for one more holder: of that state, else the newest."""
        held = [snapshot for snapshot in self._live if _answers(snapshot, key, step, edits)]
        kept = [entry for entry in self._kept if _answers(entry.snapshot, key, step, edits)]
        best = max(held, key=_state, default=None)
        if best is not None and all(_state(entry.snapshot) <= _state(best) for entry in kept):
            best.holders += 1
            return best
        if not kept:
            return None
        entry = max(kept, key=lambda entry: _state(entry.snapshot))
        self._kept.remove(entry)
        assert entry.snapshot is not None
        return self._enliven(entry.snapshot)

    def reserve(self, key: Key, *, at_boundary: bool, with_buffers: bool = False) -> Snapshot:
        """Room for one more snapshot, with one holder; its block may have to be made yet.

        Raises:
            ExhaustedError: the budget has no room for it.
        """
        snapshot = Snapshot(key, at_boundary, with_buffers)
        if snapshot.size_bytes:
            snapshot.block = self._take_kept(snapshot.size_bytes)
            if snapshot.block is None:
                self._make_room(block_bytes(snapshot.size_bytes), key.source)
        return self._enliven(snapshot)

    def lease(self, snapshot: Snapshot, lease_s: float) -> Lease:
        """Turns one holder of the snapshot into a lease.

        Raises:
            ExhaustedError: too many leases; the caller still holds.
            ConflictError: the epoch has ended; likewise.
        """
        if self._closed:
            raise ConflictError("the epoch of the snapshot has ended; fetch the layout again")
        if len(self._leases) >= MAX_LEASES:
            raise ExhaustedError(
                f"{MAX_LEASES} snapshots are leased already; release some or let them expire"
            )
        lease = Lease(secrets.token_hex(16), snapshot, self._clock_ns() + int(lease_s * 1e9))
        self._leases[lease.snapshot_id] = lease
        return lease

    def get(self, snapshot_id: str) -> Lease:
        """The lease of that name.

        Raises:
            NotFoundError: it ended, or never was.
        """
        lease = self._leases.get(snapshot_id)
        if lease is None or lease.expires_ns <= self._clock_ns():
            raise NotFoundError(
                "snapshot_id: no such snapshot is leased here; its lease has ended or it was "
                "released. Pin again, and renew the lease while reading"
            )
        return lease

    def filled(self, snapshot_id: str) -> Snapshot:
        """The snapshot of a lease, its bytes there.

        Raises:
            NotFoundError: as `get`.
            ConflictError: its boundary has not been captured.
        """
        snapshot = self.get(snapshot_id).snapshot
        if snapshot.fill is not Fill.FILLED:
            raise ConflictError(f"the snapshot is {snapshot.fill.value}; schedule a boundary first")
        return snapshot

    def renew(self, snapshot_id: str, lease_s: float) -> None:
        """Prolongs a lease from now on. Raises NotFoundError."""
        self.get(snapshot_id).expires_ns = self._clock_ns() + int(lease_s * 1e9)

    def release(self, snapshot_id: str) -> None:
        """Ends a lease; does nothing when there is none."""
        lease = self._leases.pop(snapshot_id, None)
        if lease is not None:
            self.drop(lease.snapshot)

    def hold(self, snapshot: Snapshot) -> Snapshot:
        """One more holder; `drop` ends it."""
        snapshot.holders += 1
        return snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """One holder less; the last one frees the memory or keeps it."""
        snapshot.holders -= 1
        assert snapshot.holders >= 0
        if snapshot.holders == 0:
            self._live.discard(snapshot)
            self._live_bytes[snapshot.key.source] -= _taken_bytes(snapshot)
            self._let_go(snapshot)

    def expire(self) -> int | None:
        """Ends what is overdue. Returns when to look again (None: nothing is due)."""
        now_ns = self._clock_ns()
        for lease in list(self._leases.values()):
            if lease.expires_ns <= now_ns:
                self.release(lease.snapshot_id)
        for entry in [e for e in self._kept if e.since_ns + self._idle_ns <= now_ns]:
            self._discard(entry)
        due = [lease.expires_ns for lease in self._leases.values()]
        due += [entry.since_ns + self._idle_ns for entry in self._kept]
        return min(due, default=None)

    def keep_for_ever(self) -> None:
        """The trainer has ended: what is kept may be the last of its kind."""
        self._idle_ns = 1 << 62

    def close(self) -> None:
        """Ends all leases and frees all memory, at once or when its last holder drops it."""
        self._closed = True
        for snapshot_id in list(self._leases):
            self.release(snapshot_id)
        for entry in list(self._kept):
            self._discard(entry)

    def _enliven(self, snapshot: Snapshot) -> Snapshot:
        snapshot.holders = 1
        self._live.add(snapshot)
        self._live_bytes[snapshot.key.source] += _taken_bytes(snapshot)
        return snapshot

    def _let_go(self, snapshot: Snapshot) -> None:
        block = snapshot.block
        if block is None:
            return
        if self._closed or snapshot.tainted or snapshot.map_count:
            snapshot.block = None
            self._blocks.dispose(block)
            return
        kept = snapshot if snapshot.shareable else None
        self._kept.append(_Kept(block, self._clock_ns(), kept))

    def _take_kept(self, size_bytes: int) -> Block | None:
        wanted = block_bytes(size_bytes)
        fitting = [
            entry
            for entry in self._kept
            if wanted <= entry.block.size_bytes <= wanted + wanted // _WASTE_DIVISOR
        ]
        if not fitting:
            return None
        # Memory without known bytes first, then the oldest bytes.
        entry = min(fitting, key=lambda e: (e.snapshot is not None, e.since_ns))
        self._kept.remove(entry)
        return entry.block

    def _make_room(self, needed_bytes: int, source: int) -> None:
        # Readers of gradients must not keep others from parameters: each source has the budget.
        live_bytes = self._live_bytes[source]
        budget_bytes = self.budget_bytes * _BUDGETS.get(source, 1)
        while self._kept and live_bytes + self.kept_bytes + needed_bytes > budget_bytes:
            if live_bytes + needed_bytes > budget_bytes:
                break
            self._discard(min(self._kept, key=lambda entry: entry.since_ns))
        free_bytes = budget_bytes - live_bytes
        if needed_bytes > free_bytes:
            raise ExhaustedError(
                f"a snapshot of {needed_bytes:,} bytes does not fit: {max(free_bytes, 0):,} of the "
                f"snapshot budget of {budget_bytes:,} bytes are free. Ask for fewer tensors, "
                "try again when other snapshots are released, or raise the sidecar's budget"
            )

    def _discard(self, entry: _Kept) -> None:
        self._kept.remove(entry)
        self._blocks.dispose(entry.block)


def _taken_bytes(snapshot: Snapshot) -> int:
    # A taken block may be larger than what is wanted of it.
    if snapshot.block is not None:
        return snapshot.block.size_bytes
    return block_bytes(snapshot.size_bytes)


def _state(snapshot: Snapshot | None) -> tuple[int, int]:
    return (snapshot.step, snapshot.edits) if snapshot is not None else (-1, -1)


def _answers(snapshot: Snapshot | None, key: Key, step: int | None, edits: int | None) -> bool:
    return (
        snapshot is not None
        and snapshot.shareable
        and snapshot.key == key
        and (step is None or snapshot.step == step)
        and (edits is None or snapshot.edits == edits)
    )
