"""Snapshots and their leases: which token holds which bytes of which step, within a byte budget.

Life of a snapshot's memory:

    free --reserve--> EMPTY --arm--> PENDING --filled--> FILLED --last lease ends--> kept
     ^                                                                                 |
     +------------------- taken for another snapshot, or idle too long ----------------+

Kept memory retains its bytes: an equal request at the same step gets them again, and a torn rank
can still serve the last ones under their own step. Memory that a client still maps is given up
instead (the kernel keeps it for that client alone).

A third of the budget is reserved for the control plane (exports included) and the owner; one
token gets at most half of the rest. Each holder of a shared snapshot is charged in full, but it
counts once towards the total of all tokens.

Memory is memfds, mapped and prefaulted off the event loop before they are needed, and reused: a
fresh page costs ten times a warm copy, and the trainer may be waiting while a copy runs. All
methods run on the event loop's thread; nothing here blocks, except making blocks.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from paramd.errors import ConflictError, DeniedError, ExhaustedError, NotFoundError
from paramd.memory import descriptors
from paramd.memory.arena import HostArena
from paramd.memory.control_page import NO_CHANGES, Changes
from paramd.memory.descriptors import pages
from paramd.memory.device_arena import DeviceReader
from paramd.memory.gate import CopySpan
from paramd.memory.gradient_program import Notes
from paramd.memory.left import HEADROOM, Purpose, Room
from paramd.state import Settling, StateName
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.admission import Shares, Who


class Block:
    """A memfd; `buffer` and `address` are its mapping in this process."""

    def __init__(
        self,
        size_bytes: int,
        reader: DeviceReader | None = None,
        *,
        room: Room = HEADROOM,
        purpose: Purpose = Purpose.SNAPSHOT,
    ) -> None:
        """`reader`: have its device fill it by itself, if the driver allows that. Slow."""
        self._reader: DeviceReader | None = None
        self.size_bytes = pages(size_bytes)
        self.descriptor = descriptors.create_memory(
            "paramd-snapshot", self.size_bytes, room, purpose
        )
        try:
            self._arena = HostArena(self.descriptor, self.size_bytes)
            self._arena.populate()
            self.buffer = self._arena.buffer
            self.address = self._arena.address
            if reader is not None and reader.lock(self.address, self.size_bytes):
                self._reader = reader
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def lost(self) -> bool:
        """Whether the device may still write to it, so that nobody may use it again."""
        return self._reader is not None and self._reader.is_late(self.address)

    def close(self) -> None:
        """Unmap it here and close the descriptor; other processes' mappings remain."""
        if self._reader is not None:
            self._reader.unlock(self.address)
        self.buffer = memoryview(b"")
        self._arena.close()
        os.close(self.descriptor)


class BlockMaker:
    """Makes blocks, and frees them, on one executor."""

    def __init__(
        self,
        executor: Executor,
        *,
        room: Room = HEADROOM,
        purpose: Purpose = Purpose.SNAPSHOT,
    ) -> None:
        """`room` grants their memory, which is for `purpose`."""
        self._executor = executor
        self._room, self._purpose = room, purpose

    def within(self, room: Room, purpose: Purpose) -> BlockMaker:
        """A maker on the same executor, for another purpose."""
        return BlockMaker(self._executor, room=room, purpose=purpose)

    def make(self, size_bytes: int, reader: DeviceReader | None = None) -> Block:
        """Make a prefaulted block. Slow: call off the event loop. Raises ExhaustedError."""
        try:
            return Block(size_bytes, reader, room=self._room, purpose=self._purpose)
        except OSError as error:
            raise ExhaustedError(
                f"no memory for a snapshot of {size_bytes:,} bytes ({error.strerror}); "
                "ask for less, or wait until other snapshots are released"
            ) from error

    def dispose(self, block: Block) -> None:
        """Free a block, later and on another thread: unmapping a gigabyte takes 50 ms."""
        self._executor.submit(block.close)


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of a snapshot's bytes: equal keys at one step mean equal bytes."""

    incarnation: int
    spans: tuple[tuple[int, int], ...]
    """Half-open byte spans of the arena, sorted, not overlapping."""
    source: int = 0
    """A `paramd.v1.Source`."""
    state_key: str = ""
    """Key of the optimizer state; empty for other sources."""

    @property
    def size_bytes(self) -> int:
        return sum(end - begin for begin, end in self.spans)


BASES = -1
"""Not a source: the key of the budget for bases."""


class Fill(Enum):
    """State of the bytes."""

    EMPTY = "prepared, not filled"
    PENDING = "being filled"
    FILLED = "filled"


@dataclass(eq=False, slots=True)
class Snapshot:
    """Bytes of one step, shared by the leases on them."""

    key: Key
    at_boundary: bool
    with_buffers: bool = False
    block: Block | None = None
    fill: Fill = Fill.EMPTY
    step: int = -1
    edits: int = -1
    history: int = 0
    """With the key's incarnation, step, edits, history and label name the state of the bytes."""
    iteration: int = -1
    unsettled: bool = False
    """As in `paramd.v1.Header`."""
    label: str = ""
    """As in `paramd.v1.Header`."""
    proof: int = 0
    """Proof of the copy, as in `memory.gate.State`; 0 if it cannot be shared, or of a mirror."""
    changes: Changes = NO_CHANGES
    """What its trainer knew of changes outside of its update when it was copied."""
    settling: Settling = Settling.UNKNOWN
    """How far the state had come when it was copied."""
    is_true: bool = False
    """The state is over, and no change outside of updates was found in it."""
    token: int = 0
    """Token of the agreed request that filled it; of a mark, its lineage. 0: neither."""
    shown: bool = False
    """Somebody has been given its bytes, or the right to read them: no other boundary fills it."""
    private: bool = False
    """Made for a reader that accepts values changed after their update: not shared."""
    holders: int = 0
    """Leases, waiting requests, running copies and reductions."""
    is_base: bool = False
    """Kept for followers (deltas.py), and counted against their budget."""
    map_count: int = 0
    """Clients that currently map the memory."""
    tainted: bool = False
    """A client left without an unmap: never reuse the memory."""
    notes: Notes | None = None
    """For gradients: facts that the bytes do not show."""
    optimizer: bytes = b""
    """As in `paramd.v1.PinSnapshotResponse`."""

    @property
    def size_bytes(self) -> int:
        return self.key.size_bytes

    @property
    def budget(self) -> int:
        """The budget that its bytes count against: of its source, or of bases."""
        return BASES if self.is_base else self.key.source

    @property
    def shareable(self) -> bool:
        """Whether others may have it: one with changed values or other weights is not shared."""
        whole = self.fill is Fill.FILLED and not self.tainted
        return whole and not self.at_boundary and not self.private and not self.label

    @property
    def state(self) -> StateName:
        return StateName(self.key.incarnation, self.history, self.step, self.edits, self.label)

    def view(self) -> memoryview:
        """The bytes, in this process."""
        return self.block.buffer[: self.size_bytes] if self.block is not None else memoryview(b"")


@dataclass(eq=False, slots=True)
class Lease:
    """One holder's right to a snapshot until `expires_ns`."""

    snapshot_id: str
    snapshot: Snapshot
    expires_ns: int
    who: str | None = None
    """The token that holds it; None: the control plane or the owner."""


def copy_spans(snapshot: Snapshot, arena_address: int) -> list[CopySpan]:
    """Spans to copy to fill a snapshot; its block must exist."""
    if snapshot.block is None:
        return []
    target = snapshot.block.address
    spans = []
    for begin, end in snapshot.key.spans:
        spans.append(CopySpan(arena_address + begin, target, end - begin))
        target += end - begin
    return spans


class Charges:
    """Bytes charged to each token, by source. Event loop only."""

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

    def check(self, who: Who, source: int, needed_bytes: int, *, is_new: bool = True) -> None:
        """Check that `who` may hold that much more; `is_new`: no token holds the snapshot yet.

        Raises:
            ExhaustedError: When this token's share, or that of all tokens, is used up.
        """
        if who is None:
            return
        share_bytes, mine = self.share_bytes(source), self._taken_bytes[source, who]
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
                f"{for_tokens:,} bytes, and the rest of the snapshot budget is reserved for the "
                "control plane and the owner; try again when other snapshots are released"
            )

    def check_more(self, who: Who, snapshot: Snapshot, size_bytes: int) -> None:
        """As `check`, for a lease on an existing snapshot."""
        held = self._held.get(snapshot, Counter())
        if not held[who]:
            is_new = not any(other is not None for other in held)
            self.check(who, snapshot.key.source, size_bytes, is_new=is_new)

    def add(self, who: Who, snapshot: Snapshot, size_bytes: int) -> None:
        held = self._held.setdefault(snapshot, Counter())
        size_bytes = self._sizes.setdefault(snapshot, size_bytes)
        source = snapshot.key.source
        if who is not None and not any(other is not None for other in held):
            self._token_bytes[source] += size_bytes
        held[who] += 1
        if held[who] == 1:
            self._taken_bytes[source, who] += size_bytes

    def remove(self, who: Who, snapshot: Snapshot) -> None:
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


MAX_LEASES = 4096
"""Most leases; each is small, but not free."""

# A kept block is reused if it exceeds the wanted size by at most wanted // this.
_WASTE_DIVISOR = 4

_BUDGETS: dict[int, int] = {pb.SOURCE_MOMENTS: 4}
"""Budget multiples by source: optimizer state has several tensors per parameter."""


@dataclass(eq=False, slots=True)
class _Kept:
    block: Block
    since_ns: int
    snapshot: Snapshot | None = field(default=None)


class SnapshotStore:
    """Leases, budget and kept memory of one rank's snapshots in one incarnation."""

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
        self._lease_shares = Shares(MAX_LEASES, "leases")
        self._charges = Charges(self._budget_of)
        self._live: set[Snapshot] = set()
        self._live_bytes: Counter[int] = Counter()
        self._kept: list[_Kept] = []
        self._closed = False
        self._kept_for_ever = False
        self.check: Callable[[Snapshot], None] = lambda _: None
        """Raises if a filled snapshot's bytes turned out not to be of a single state."""

    @property
    def used_bytes(self) -> int:
        return self._live_bytes.total()

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory kept for reuse."""
        return sum(kept.block.size_bytes for kept in self._kept)

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    def leases(self, now_ns: int) -> list[Lease]:
        """Live leases, the first to expire first."""
        alive = [lease for lease in self._leases.values() if lease.expires_ns > now_ns]
        return sorted(alive, key=lambda lease: lease.expires_ns)

    def find(
        self,
        key: Key,
        *,
        history: int | None = None,
        step: int | None = None,
        proof: int | None = None,
    ) -> Snapshot | None:
        """A filled snapshot of `key`, with one more hold: of the given state and proof of the copy,
        or else the newest. A step alone, without a history, names no state; with one it names the
        settled state, never one that was copied at rest."""
        wanted = (key, history, step, proof)
        held = [snapshot for snapshot in self._live if _answers(snapshot, *wanted)]
        kept = [entry for entry in self._kept if _answers(entry.snapshot, *wanted)]
        best = max(held, key=_order, default=None)
        if best is not None and all(_order(entry.snapshot) <= _order(best) for entry in kept):
            best.holders += 1
            return best
        if not kept:
            return None
        entry = max(kept, key=lambda entry: _order(entry.snapshot))
        self._kept.remove(entry)
        assert entry.snapshot is not None
        return self._enliven(entry.snapshot)

    def reserve(
        self, key: Key, *, at_boundary: bool, with_buffers: bool = False, who: Who = None
    ) -> Snapshot:
        """Reserve room for a snapshot, held once; its block may not exist yet.

        Charged to `who` until `uncharge`.

        Raises:
            ExhaustedError: When the budget, or the share of `who`, is used up.
        """
        snapshot = Snapshot(key, at_boundary, with_buffers)
        self._charges.check(who, key.source, pages(snapshot.size_bytes))
        if snapshot.size_bytes:
            snapshot.block = self._take_kept(snapshot.size_bytes)
            if snapshot.block is None:
                self._make_room(pages(snapshot.size_bytes), key.source)
        self._charges.add(who, snapshot, pages(snapshot.size_bytes))
        return self._enliven(snapshot)

    def uncharge(self, snapshot: Snapshot, who: Who) -> None:
        """End the charge that `reserve` began; leases are charged separately."""
        self._charges.remove(who, snapshot)

    def lease(self, snapshot: Snapshot, lease_s: float, who: Who = None) -> Lease:
        """Turn one hold on the snapshot into a lease.

        Raises:
            ExhaustedError: Too many leases or bytes.
            ConflictError: The incarnation has ended. Then the caller keeps its hold.
        """
        if self._closed:
            raise ConflictError("the run of the snapshot has ended; fetch the layout again")
        size_bytes = pages(snapshot.size_bytes)
        self._charges.check_more(who, snapshot, size_bytes)
        self._lease_shares.take(who)
        self._charges.add(who, snapshot, size_bytes)
        expires_ns = self._clock_ns() + int(lease_s * 1e9)
        lease = Lease(secrets.token_hex(16), snapshot, expires_ns, who)
        self._leases[lease.snapshot_id] = lease
        return lease

    def get(self, snapshot_id: str) -> Lease:
        """The live lease with that id.

        Raises:
            NotFoundError: If it has ended, or never existed.
        """
        lease = self._leases.get(snapshot_id)
        if lease is None or lease.expires_ns <= self._clock_ns():
            raise NotFoundError(
                "snapshot_id: no such snapshot is leased here; its lease has ended or it was "
                "released. Pin again, and renew the lease while reading"
            )
        return lease

    def filled(self, snapshot_id: str) -> Snapshot:
        """The filled snapshot of a lease.

        Raises:
            NotFoundError: As `get`.
            ConflictError: Its boundary was not captured.
            AbortedError: Its bytes turned out not to be of one state.
        """
        snapshot = self.get(snapshot_id).snapshot
        if snapshot.fill is not Fill.FILLED:
            raise ConflictError(f"the snapshot is {snapshot.fill.value}; schedule a boundary first")
        self.check(snapshot)
        snapshot.shown = True
        return snapshot

    def renew(self, snapshot_id: str, lease_s: float, who: Who = None) -> None:
        """Extend a lease, counted from now.

        Raises:
            NotFoundError, DeniedError: Another's.
        """
        lease = self.get(snapshot_id)
        _check_holder(lease, who)
        lease.expires_ns = self._clock_ns() + int(lease_s * 1e9)

    def release(self, snapshot_id: str, who: Who = None) -> None:
        """End a lease; a no-op if there is none.

        Raises:
            DeniedError: Another's.
        """
        lease = self._leases.get(snapshot_id)
        if lease is None:
            return
        _check_holder(lease, who)
        del self._leases[snapshot_id]
        self._lease_shares.give_back(lease.who)
        self._charges.remove(lease.who, lease.snapshot)
        self.drop(lease.snapshot)

    def hold(self, snapshot: Snapshot) -> Snapshot:
        """Add a holder; `drop` removes it."""
        snapshot.holders += 1
        return snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """Remove a holder; after the last the memory is freed or kept."""
        snapshot.holders -= 1
        assert snapshot.holders >= 0
        if snapshot.holders == 0:
            self._live.discard(snapshot)
            self._live_bytes[snapshot.budget] -= _taken_bytes(snapshot)
            snapshot.is_base = False
            self._release_memory(snapshot)

    def count_as_base(self, snapshot: Snapshot, is_base: bool) -> None:
        """Count a held snapshot's bytes against the budget of bases from now on, or no longer."""
        self._live_bytes[snapshot.budget] -= _taken_bytes(snapshot)
        snapshot.is_base = is_base
        self._live_bytes[snapshot.budget] += _taken_bytes(snapshot)

    def expire(self) -> int | None:
        """End overdue leases; return when to call again (None: nothing will be due)."""
        now_ns = self._clock_ns()
        for lease in list(self._leases.values()):
            if lease.expires_ns <= now_ns:
                self.release(lease.snapshot_id)
        for entry in [e for e in self._kept if e.since_ns + self._idle_ns <= now_ns]:
            self._discard(entry)
        due = [lease.expires_ns for lease in self._leases.values()]
        due += [entry.since_ns + self._idle_ns for entry in self._kept]
        return min(due, default=None)

    @property
    def gives_idle(self) -> bool:
        """Whether kept memory may be freed: once the trainer has ended, it may be the last copy."""
        return not self._kept_for_ever

    def take_idle(self) -> list[Block]:
        """Take all memory away that is kept for reuse; the caller closes it, on any thread."""
        if not self.gives_idle:
            return []
        taken = [entry.block for entry in self._kept]
        self._kept.clear()
        return taken

    def keep_for_ever(self) -> None:
        """Never free kept memory: the trainer has ended, and it may be the last copy."""
        self._idle_ns = 1 << 62
        self._kept_for_ever = True

    def close(self) -> None:
        """End all leases and free all memory, at once or when its last holder drops it."""
        self._closed = True
        for snapshot_id in list(self._leases):
            self.release(snapshot_id)
        for entry in list(self._kept):
            self._discard(entry)

    def _enliven(self, snapshot: Snapshot) -> Snapshot:
        snapshot.holders = 1
        self._live.add(snapshot)
        self._live_bytes[snapshot.budget] += _taken_bytes(snapshot)
        return snapshot

    def _release_memory(self, snapshot: Snapshot) -> None:
        block = snapshot.block
        if block is None:
            return
        # A client may still map it, and its view must never change.
        if self._closed or snapshot.tainted or snapshot.map_count or block.lost:
            snapshot.block = None
            self._blocks.dispose(block)
            return
        kept = snapshot if snapshot.shareable else None
        self._kept.append(_Kept(block, self._clock_ns(), kept))

    def _take_kept(self, size_bytes: int) -> Block | None:
        wanted = pages(size_bytes)
        fitting = [
            entry
            for entry in self._kept
            if wanted <= entry.block.size_bytes <= wanted + wanted // _WASTE_DIVISOR
        ]
        if not fitting:
            return None
        # Prefer memory without usable bytes, then the oldest.
        entry = min(fitting, key=lambda e: (e.snapshot is not None, e.since_ns))
        self._kept.remove(entry)
        return entry.block

    def _make_room(self, needed_bytes: int, source: int) -> None:
        # Each source has its own budget: gradient readers must not crowd out parameter readers.
        live_bytes = self._live_bytes[source]
        budget_bytes = self._budget_of(source)
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

    def _budget_of(self, source: int) -> int:
        return self.budget_bytes * _BUDGETS.get(source, 1)

    def _discard(self, entry: _Kept) -> None:
        self._kept.remove(entry)
        self._blocks.dispose(entry.block)


def _check_holder(lease: Lease, who: Who) -> None:
    """Raise DeniedError if the lease is another token's, unless for the control plane or owner."""
    if who is not None and lease.who != who:
        raise DeniedError("snapshot_id: the snapshot is leased to another token")


def _taken_bytes(snapshot: Snapshot) -> int:
    # A reused block may be larger than the snapshot.
    if snapshot.block is not None:
        return snapshot.block.size_bytes
    return pages(snapshot.size_bytes)


def _order(snapshot: Snapshot | None) -> tuple[int, ...]:
    """Sort key, newest state last: a later history's steps are newer, however low."""
    if snapshot is None:
        return ()
    return (snapshot.history, snapshot.step, snapshot.edits)


def _answers(
    snapshot: Snapshot | None, key: Key, history: int | None, step: int | None, proof: int | None
) -> bool:
    return (
        snapshot is not None
        and snapshot.shareable
        and snapshot.key == key
        and (history is None or snapshot.history == history)
        # A resting state is not yet the step's: the script may have changed it since.
        and (step is None or (snapshot.step == step and not snapshot.unsettled))
        and (proof is None or snapshot.proof == proof)
    )
