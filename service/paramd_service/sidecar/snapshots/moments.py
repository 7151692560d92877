"""Snapshots of optimizer state, straight from the optimizer memory.

A trainer whose optimizer state lives there changes it only while SEQ is odd, as parameters, so the
same thread copies it under the same proof. Otherwise the trainer copies the state there for a
request at a boundary, proved by MOMENTS_FOR and SEQ or MIRRORED_FOR. The places of its tensors are
looked up right before each copy, since tables change with the state.

A *table* (source MOMENTS, no state key) lists the state, and has its numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from paramd.errors import ConflictError, NotFoundError, UsageError
from paramd.memory.arena import is_mirror
from paramd.memory.continuation import EXTRA, read_kept, read_pair
from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.device_arena import STATE_BASE
from paramd.memory.gate import CopySpan, LateError
from paramd.memory.optimizer_state import (
    DEVICE_PLACES,
    TABLE_BYTES,
    OptimizerState,
    Read,
    pack_table,
    parse_state,
    read_record,
    table_text,
    with_length,
)
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.owner import AttachedMemory
from paramd_service.sidecar.snapshots.store import Key, Snapshot

NOT_KEPT = (
    "this rank's optimizer state stays in the trainer's own memory, as its parameters do, so it "
    "can be had at agreed boundaries alone: by mesh.optimizer, summon(optimizer=True) and exports"
)
NOT_RECORDED = "the optimizer's state has not been recorded yet, or not since the last update"

MISSES = 2
"""Boundaries in a row at which the copy was late or the state not recorded, after which the
trainer is asked to record it, and to wait for the copy."""
WAITS = 2 * MISSES
"""Boundaries for which the trainer is then asked. More than MISSES, since each rank counts its own
misses: a rank that began to count later asks its trainer, too, before the first one stops. With
fewer, two ranks could ask in turn forever, and all of them are needed at one boundary."""
READ_BYTES = 64 << 10
"""Bytes fetched at once for numbers that are on a device."""

Prepare = Callable[[], Sequence[CopySpan] | None]


class Asking:
    """Whether the trainer is asked to have the state ready at a boundary."""

    def __init__(self) -> None:
        self._missed = 0
        self._left = 0

    def asks(self) -> bool:
        """Whether the trainer is asked for this boundary, which is counted."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def ended(self, *, captured: bool, missed: bool) -> None:
        """Record whether this boundary had or missed the state, asked for or not."""
        self._missed = 0 if captured else self._missed + missed
        if self._missed >= MISSES:
            self._missed, self._left = 0, WAITS


class Moments:
    """One attachment's optimizer state. Event loop, except the function that `filling` returns,
    which runs on the copying thread."""

    def __init__(self, attached: AttachedMemory) -> None:
        self._page = attached.page
        self._arena_bytes = attached.request.arena_bytes
        self._copy = attached.copy
        self._memory = SparseMemory(attached.shared.optimizer)
        self._continuation = SparseMemory(attached.shared.continuation)
        self._parsed: tuple[bytes, OptimizerState] | None = None
        self._facts: dict[Snapshot, dict[str, Any]] = {}
        self._asking = Asking()

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        self._continuation.close()

    @property
    def lives_here(self) -> bool:
        """Whether the state lives in the optimizer memory; else it is copied there on request."""
        return self._page[Word.MOMENTS_LIVE] != 0

    def needs_trainer(self) -> bool:
        """Whether the trainer must copy the state for a boundary, or wait; counts the boundary."""
        return self._asking.asks() or not self.lives_here

    def ended(self, *, captured: bool, missed: bool) -> None:
        """A boundary with optimizer state has ended. On the copying thread."""
        self._asking.ended(captured=captured, missed=missed)
        if not self.lives_here:
            self._memory.release(0, self._memory.size_bytes)

    def address_of(self, place: int) -> int:
        """The address that state at a place is copied from."""
        if place >= DEVICE_PLACES:
            return STATE_BASE + place - DEVICE_PLACES
        return self._memory.address + place

    def reader(self) -> Read:
        """A function that reads a few numbers of the present state, one after the other. On the
        copying thread; raises LateError, DeviceError when called.

        From a device, whole blocks are fetched, since single numbers of the state are adjacent
        there (trainer/resume/optimizer_home.py).
        """

        @cache
        def block(number: int) -> bytes:
            begin = number * READ_BYTES
            size_bytes = max(min(READ_BYTES, self._page[Word.STATE_BYTES] - begin), 0)
            room = ctypes.create_string_buffer(size_bytes)
            self._copy([CopySpan(STATE_BASE + begin, ctypes.addressof(room), size_bytes)])
            return room.raw

        def read(place: int, size_bytes: int) -> bytes:
            if place < DEVICE_PLACES:
                return bytes(self._memory.buffer[place : place + size_bytes])
            found = b""
            while len(found) < size_bytes:
                number, at = divmod(place - DEVICE_PLACES + len(found), READ_BYTES)
                part = block(number)[at : at + size_bytes - len(found)]
                if not part:
                    # Beyond the state: the table is of another state, whose copy will not count.
                    raise LateError
                found += part
            return found

        return read

    def now(self) -> tuple[OptimizerState, dict[str, Any]] | None:
        """The state and its record, if recorded at the page's step."""
        page = self._page
        step = page[Word.MIRRORED_STEP if is_mirror(page.words) else Word.STEP]
        # The step first: it is written after its record.
        if page[Word.RECORD_STEP] != step or (found := self._read()) is None:
            return None
        state, record = found
        # A record is rewritten only when something in it has changed.
        return state, {**record, "step": step}

    def check(self, key: str) -> None:
        """Check that the state exists, as far as is known now; "" means no particular key.

        Raises:
            ConflictError: If the trainer does not keep it here.
            NotFoundError: For an unknown key.
        """
        if not self.lives_here:
            raise ConflictError(NOT_KEPT)
        found = self._read()
        if found is None:
            raise ConflictError(NOT_RECORDED)
        state, _ = found
        if state.failure:
            raise ConflictError(f"the optimizer's state cannot be read: {state.failure}")
        if key and key not in state.keys:
            reasons = {why for one in state.params for k, why in one.left_out.items() if k == key}
            known = ", ".join(state.keys) or "none"
            why = f" ({', '.join(sorted(reasons))})" if reasons else ""
            raise NotFoundError(f"state_key: no {key!r}{why}; known: {known}")

    def missed(self, step: int) -> str:
        """Why the state of a past step was not copied; empty: no particular reason."""
        found = self._read()
        passed = step and self._page[Word.STEP] >= step
        if passed and (found is None or self._page[Word.RECORD_STEP] < step):
            return (
                f"the optimizer's state of step {step} was not recorded (PARAMD_KEEP_EVERY, or the "
                "script changes parameters between forward and update)"
            )
        return ""

    def filling(self, snapshots: Sequence[Snapshot]) -> Prepare:
        """A function that finds the spans to copy into snapshots of state, and fills tables."""

        def prepare() -> Sequence[CopySpan] | None:
            found = self.now()
            if found is None:
                return None
            state, record = found
            try:
                facts = state.facts(record, self.reader(), self._arena_bytes)
            except LateError:
                return None
            spans: list[CopySpan] = []
            for snapshot in snapshots:
                if not is_table(snapshot.key):
                    self._facts[snapshot] = facts
                    spans += self._spans(snapshot, state)
                elif snapshot.block is not None:
                    table = pack_table(facts)
                    snapshot.block.buffer[: len(table)] = table
            return spans

        return prepare

    def fill_extra(self, snapshots: Sequence[Snapshot]) -> str:
        """Fill tables of extra state as noted last; why not, else empty. On the copying thread."""
        kept = read_kept(self._continuation.buffer, EXTRA)
        table = with_length(kept[0].payload) if kept else b""
        if not 0 < len(table) <= TABLE_BYTES:
            return f"the trainer noted no extra state of at most {TABLE_BYTES:,} bytes"
        for snapshot in snapshots:
            if snapshot.block is not None:
                snapshot.block.buffer[: len(table)] = table
        return ""

    def facts_of(self, snapshot: Snapshot) -> bytes:
        """Facts found with the last copy into `snapshot`, as in `PinSnapshotResponse`."""
        return table_text(self._facts.pop(snapshot))

    def forget(self, snapshot: Snapshot) -> None:
        """Drop the facts of a snapshot that was not filled."""
        self._facts.pop(snapshot, None)

    def _spans(self, snapshot: Snapshot, state: OptimizerState) -> list[CopySpan]:
        block = snapshot.block
        if block is None:
            return []
        spans, base, filled = [], block.address, 0
        for begin, end in snapshot.key.spans:
            for at, place, size in state.pieces(snapshot.key.state_key, begin, end):
                target = base + at - begin
                spans.append(CopySpan(self.address_of(place), target, size))
                filled += size
            base += end - begin
        if filled < snapshot.size_bytes:
            # Zero between parameters, and where one has no such state.
            ctypes.memset(block.address, 0, snapshot.size_bytes)
        return spans

    def _read(self) -> tuple[OptimizerState, dict[str, Any]] | None:
        """The table's state, and its newest record."""
        pair = read_pair(self._continuation.buffer)
        if pair is None:
            return None
        record, table = pair
        parsed = self._parsed
        try:
            if parsed is None or parsed[0] != table:
                parsed = self._parsed = table, parse_state(table)
            return parsed[1], read_record(record)
        except UsageError:
            return None


def is_moments(key: Key) -> bool:
    """Whether a key is of optimizer state, or of its table."""
    return key.source == pb.SOURCE_MOMENTS


def is_extra(key: Key) -> bool:
    """Whether a key is of extra state, which is a table, too."""
    return key.source == pb.SOURCE_EXTRA_STATE


def is_table(key: Key) -> bool:
    return is_extra(key) or (is_moments(key) and not key.state_key)


def table_key(incarnation: int, source: pb.Source.ValueType) -> Key:
    """The key of a table. Its spans count bytes of the table, not of the arena."""
    return Key(incarnation, ((0, TABLE_BYTES),), source, "")
