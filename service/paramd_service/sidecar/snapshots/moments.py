"""Snapshots of all optimizer state of one step, by a mirror of it.

A reader pins the table (source MOMENTS, no state key) together with the parameters. Where the
state lies in the optimizer memory, the copying thread mirrors it along with the parameters and
writes the table; training goes on. Otherwise, at a boundary, the trainer does both. The table
lists the keys. Each key is then pinned once, with `at_step`: its bytes move from the mirror into
the snapshot, and the mirror's pages are released as they go. The rest is released when the
table's lease ends.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from paramd.errors import AbortedError, ConflictError, NotFoundError
from paramd.memory.control_page import Word
from paramd.memory.descriptors import PAGE, SparseMemory
from paramd.memory.gate import CopySpan, LateError
from paramd.memory.handover import MOMENT_ROOMS
from paramd.memory.moments_table import (
    TABLE_BYTES,
    parse_table,
    room_begin,
    table_begin,
    write_table,
)
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.admission import CALLER
from paramd_service.aio import uncancelled
from paramd_service.sidecar.owner import AttachedMemory
from paramd_service.sidecar.snapshots.live_moments import LiveMoments, Prepare
from paramd_service.sidecar.snapshots.store import (
    BlockMaker,
    Fill,
    Key,
    Lease,
    Snapshot,
    SnapshotStore,
)

MISSES = 2
"""Boundaries at which the copying thread was late, or the state was not recorded, after which the
trainer is asked to mirror it: that holds it up, and always works."""

BY_TRAINER = 2 * MISSES
"""Boundaries for which the trainer is asked then. More than MISSES, since each rank counts its own
misses: a rank that began to count later asks its trainer, too, before the first one stops. With
fewer, two ranks could ask by turns for ever, and a table needs all of them at one boundary."""

ROOMS_IDLE_S = 10.0
"""How long memory of a mirror that was missed is kept for the next attempt."""

MOVE_BYTES = 16 << 20
"""Bytes per move: what mirror and snapshot hold twice."""


class WhoMirrors:
    """Whether the copying thread mirrors the state at the next boundary, or the trainer."""

    def __init__(self) -> None:
        self._missed = 0
        self._by_trainer = 0

    def trainer(self) -> bool:
        """Whether the trainer is asked for this boundary; counts it."""
        if not self._by_trainer:
            return False
        self._by_trainer -= 1
        return True

    def missed(self) -> None:
        """This boundary was missed, whoever was to mirror the state at it."""
        self._missed += 1
        if self._missed >= MISSES:
            self._missed, self._by_trainer = 0, BY_TRAINER

    def mirrored(self) -> None:
        """The state was mirrored at this boundary."""
        self._missed = 0


class Moments:
    """The mirror of one attachment. Runs on the event loop; bytes move on an executor."""

    def __init__(
        self,
        attached: AttachedMemory,
        *,
        store: SnapshotStore,
        blocks: BlockMaker,
        executor: Executor,
        lease: Callable[[Snapshot, float], Lease],
        live: LiveMoments,
    ) -> None:
        self._page = attached.page
        self._live = live
        self._memory = SparseMemory(attached.shared.moments)
        self._arena_bytes = attached.request.arena_bytes
        self._store = store
        self._blocks = blocks
        self._executor = executor
        self._lease = lease
        self._source: Snapshot | None = None
        """The table's snapshot, which keeps the mirror alive."""
        self._table: dict[str, Any] = {}
        self._taken: dict[str, list[tuple[int, int]]] = {}
        self._moving = 0
        self._asked = 0
        """Tables asked for that are not there yet."""
        self._who = WhoMirrors()
        self._reserved = 0
        """First bytes of the memory that have pages. Of the copying thread while one is asked."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    def close(self) -> None:
        """Release the memory."""
        self._source, self._closed = None, True
        self._memory.close()

    @property
    def is_live(self) -> bool:
        """Whether the state can be mirrored without the trainer."""
        return self._page[Word.MOMENTS_LIVE] == 1 and not self._live.unfit()

    def ask(self, *, at_boundary: bool) -> Prepare | None:
        """Begin to ask for a table; `ended` ends it.

        Returns:
            What mirrors the state on the copying thread; None: the trainer has to.
        """
        self._asked += 1
        if not self.is_live or (at_boundary and self._who.trainer()):
            return None
        return self._mirror

    def ended(self, snapshot: Snapshot | None, *, missed: bool = False) -> None:
        """The table that was asked for is there, in `snapshot`; or, with None, is not.

        Args:
            missed: because the copying thread was late, or the state was not recorded.

        Raises:
            UsageError: the memory holds no valid table.
        """
        self._asked -= 1
        if snapshot is not None:
            self._who.mirrored()
            self._mirrored(snapshot)
            return
        if missed:
            self._who.missed()
        if self._sweeping is None:
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_later(ROOMS_IDLE_S, self._sweep_rooms)

    def _mirror(self) -> list[CopySpan] | None:
        """Write the table, and find what to copy into the rooms; None: not recorded.

        On the copying thread. Both count only if SEQ is the same after the copy.

        Raises:
            ExhaustedError: no memory for it.
        """
        found = self._live.now()
        if found is None or found[0].unfit(found[1]):
            return None
        state, record = found
        try:
            table = state.table(record, self._live.reader(), self._arena_bytes)
        except LateError:
            return None
        if len(table["keys"]) > MOMENT_ROOMS:
            return None
        needed = room_begin(len(table["keys"]), self._arena_bytes)
        if needed > self._reserved:
            self._memory.reserve(self._reserved, needed)
            self._reserved = needed
        write_table(self._memory, self._arena_bytes, table)
        spans = []
        for number, key in enumerate(table["keys"]):
            room = self._memory.address + room_begin(number, self._arena_bytes)
            for at, place, size in state.pieces(key, 0, self._arena_bytes):
                spans.append(CopySpan(self._live.address_of(place), room + at, size))
        return spans

    def check_free(self) -> None:
        """Raise ConflictError while another mirror is made, or still being read."""
        self.sweep()
        if self._source is not None or self._moving or self._asked:
            raise ConflictError(
                "another reader holds the optimizer state of an earlier step; try again when it is "
                "done"
            )

    def _mirrored(self, snapshot: Snapshot) -> None:
        begin = table_begin(self._arena_bytes)
        memory = self._memory.buffer[begin : begin + TABLE_BYTES]
        self._table = parse_table(memory)
        if snapshot.block is not None:
            snapshot.block.buffer[:TABLE_BYTES] = memory
        self._source, self._taken = snapshot, {}

    @property
    def is_held(self) -> bool:
        """Whether there is a mirror whose table a reader holds."""
        return self._source is not None and self._source.holders > 0

    def has(self, step: int) -> bool:
        """Whether that mirror is of this step."""
        return self._source is not None and self.is_held and self._source.step == step

    def sweep(self) -> None:
        """Release the mirror's memory once its table has no holder."""
        if self._source is not None and self._source.holders <= 0 and not self._moving:
            self._source = None
            self._release()

    def _sweep_rooms(self) -> None:
        self._sweeping = None
        # Once closed, the descriptor may be another file's.
        if self._source is None and not self._asked and not self._closed:
            self._release()

    def _release(self) -> None:
        self._reserved = 0
        self._memory.release(0, self._memory.size_bytes)

    async def pin(self, key: Key, step: int, lease_s: float) -> Lease:
        """Lease one key's state at the mirror's step.

        Raises:
            AbortedError: the mirror is of another step, or gone.
            NotFoundError: the optimizer has no such state.
            ConflictError: these bytes were already pinned.
        """
        source = self._source
        if source is None or source.holders <= 0 or source.step != step:
            raise AbortedError(
                f"optimizer state of step {step} is no longer mirrored here (passed); pin its "
                "table again"
            )
        room = self._room(key)
        who = CALLER.get()
        snapshot = self._store.reserve(key, at_boundary=True, who=who)
        self._store.hold(source)
        # Keeps `sweep` from releasing the mirror while the executor reads it.
        self._moving += 1
        try:
            if snapshot.size_bytes:
                await self._run(lambda: self._fill(snapshot, room))
            snapshot.step, snapshot.edits = source.step, source.edits
            snapshot.fill = Fill.FILLED
        except BaseException:
            self._store.drop(snapshot)
            raise
        finally:
            self._moving -= 1
            self._store.drop(source)
            self._store.uncharge(snapshot, who)
        return self._lease(snapshot, lease_s)

    def _room(self, key: Key) -> int:
        keys = self._table.get("keys", [])
        if key.state_key not in keys:
            known = ", ".join(map(str, keys)) or str(self._table.get("failure")) or "none"
            raise NotFoundError(f"state_key: no {key.state_key!r}; known: {known}")
        taken = self._taken.setdefault(key.state_key, [])
        for begin, end in key.spans:
            if any(begin < other_end and other < end for other, other_end in taken):
                raise ConflictError("these bytes of the optimizer state were already pinned")
        taken.extend(key.spans)
        return room_begin(keys.index(key.state_key), self._arena_bytes)

    def _fill(self, snapshot: Snapshot, room: int) -> None:
        if snapshot.block is None:
            snapshot.block = self._blocks.make(snapshot.size_bytes)
        target = snapshot.block.address
        for begin, end in snapshot.key.spans:
            for at in range(begin, end, MOVE_BYTES):
                size = min(MOVE_BYTES, end - at)
                ctypes.memmove(target, self._memory.address + room + at, size)
                target += size
                self._give_back(room + at, room + at + size)

    def _give_back(self, begin: int, end: int) -> None:
        # Only pages wholly inside: neighbouring bytes may still be wanted.
        first, last = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
        if last > first:
            self._memory.release(first, last)

    async def _run(self, work: Callable[[], None]) -> None:
        # The executor writes to the snapshot's memory until the end, cancelled or not.
        await uncancelled(asyncio.get_running_loop().run_in_executor(self._executor, work))


def is_table(key: Key) -> bool:
    """Whether a key stands for the optimizer state table."""
    return key.source == pb.SOURCE_MOMENTS and not key.state_key


def table_key(incarnation: int) -> Key:
    """The key of the table. Its spans count bytes of the table, not of the arena."""
    return Key(incarnation, ((0, TABLE_BYTES),), pb.SOURCE_MOMENTS, "")
