"""DeltaSnapshot: the changes since a state that followers have, computed once for all of them.

The base is a snapshot that was kept for them (bases.py). Without one the answer has
digests alone, and the follower reads the ranges that it does not have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paramd.deltas import ELEMENT_BYTES, Delta, make_delta
from paramd.errors import UnreachableError, UsageError
from paramd.state import StateName
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import CHUNK_BYTES, data_chunk
from paramd_service.follow.bases import Bases, State, state_of
from paramd_service.sidecar.calls import Call, CallTable
from paramd_service.sidecar.digests import digest_all
from paramd_service.sidecar.metrics import Row
from paramd_service.sidecar.owner import AttachedMemory
from paramd_service.sidecar.parts import SidecarHost, SidecarPart
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.snapshots.store import Snapshot

MAX_ITEMS = 20_000
KEPT_S = 10.0
"""How long a result is kept for slower followers."""

Item: TypeAlias = tuple[int, int, int]
"""First byte, byte after the last one, bytes per element."""
_Named: TypeAlias = tuple[State, StateName | None, tuple[Item, ...]]
"""The new state, the base's if there is one, the items compared."""


@dataclass(frozen=True, slots=True)
class _Result:
    parts: tuple[pb.DeltaPart, ...]
    data: bytes
    changed_bytes: int


@dataclass(slots=True)
class _Counts:
    """Work done for followers since the process started."""

    computed_count: int = 0
    """Comparisons of two states, each shared by all followers that request it."""
    answered_count: int = 0
    sent_bytes: int = 0
    """Bytes of changes sent."""
    changed_bytes: int = 0
    """Bytes of elements that changed, over all answers."""


class Follow(SidecarPart):
    """Computes changes, and keeps the states that they are changes of."""

    name = "follow"

    def __init__(self, host: SidecarHost) -> None:
        super().__init__(host)
        self._counts = _Counts()
        self._bases: Bases | None = None
        self._running: dict[_Named, asyncio.Future[None]] = {}
        self._results: dict[_Named, _Result] = {}

    def calls(self) -> CallTable:
        return {"DeltaSnapshot": Call(answers=self._delta)}

    async def attached(self, memory: AttachedMemory) -> None:
        pins, configured = self.host.pins, self.host.config.delta_budget_bytes
        arena_bytes = memory.request.arena_bytes
        budget_bytes = configured if configured is not None else 2 * arena_bytes + (1 << 20)
        self._bases = Bases(pins.store, budget_bytes=budget_bytes, clock_ns=time.monotonic_ns)
        pins.keep_with(self._bases)

    async def released(self) -> None:
        self._bases = None

    def samples(self) -> list[Row]:
        counts, bases = self._counts, self._bases
        return [
            (
                "deltas_computed_total",
                "Comparisons of two states for followers",
                counts.computed_count,
            ),
            (
                "deltas_answered_total",
                "Followers' requests answered from them",
                counts.answered_count,
            ),
            ("delta_sent_bytes_total", "Bytes of changes sent to followers", counts.sent_bytes),
            (
                "delta_changed_bytes_total",
                "Bytes of the elements that had changed",
                counts.changed_bytes,
            ),
            (
                "delta_base_bytes",
                "States kept for followers",
                bases.size_bytes if bases is not None else 0,
            ),
        ]

    async def _delta(
        self, request: pb.DeltaSnapshotRequest, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        host = self.host
        pins, bases = host.pins, self._bases
        store = pins.store
        if bases is None:
            raise UnreachableError("the trainer is still attaching; try again in a moment")
        snapshot = store.hold(store.filled(request.snapshot_id))
        try:
            result = await self._compared(request, snapshot, bases, timeout_s)
            # The comparison counts only if the trainer has found no stray change meanwhile.
            store.check(snapshot)
            if request.keep:
                bases.keep(snapshot)
                pins.sweep()
            header = messages.header_of(host, snapshot)
        finally:
            store.drop(snapshot)
        self._counts.answered_count += 1
        self._counts.sent_bytes += len(result.data)
        self._counts.changed_bytes += result.changed_bytes
        yield pb.DeltaSnapshotResponse(header=header, parts=result.parts).SerializeToString()
        data = memoryview(result.data)
        for offset in range(0, len(data), CHUNK_BYTES):
            yield data_chunk(data[offset : offset + CHUNK_BYTES], offset)
            host.faults.at("delta-chunk")

    async def _compared(
        self,
        request: pb.DeltaSnapshotRequest,
        snapshot: Snapshot,
        bases: Bases,
        timeout_s: float,
    ) -> _Result:
        """The changes since the follower's state, or digests alone if that is not kept. Raises
        UsageError: the items are wrong."""
        store, items = self.host.pins.store, _checked(request.items, snapshot.size_bytes)
        before = StateName(
            snapshot.key.incarnation, request.base_history, request.base_step, request.base_edits
        )
        base = bases.find((snapshot.key, before)) if request.base_step else None
        try:
            async with asyncio.timeout(timeout_s):
                named = (state_of(snapshot), before if base is not None else None, items)
                return await self._result(named, snapshot, base, bases.budget_bytes // 2)
        finally:
            if base is not None:
                store.drop(base)

    async def _result(
        self, named: _Named, snapshot: Snapshot, base: Snapshot | None, limit_bytes: int
    ) -> _Result:
        """The comparison, made by the first caller; if that call ends early, by the next."""
        while (running := self._running.get(named)) is not None:
            await asyncio.wait({running})
        if (known := self._results.get(named)) is not None:
            return known
        loop = asyncio.get_running_loop()
        running = self._running[named] = loop.create_future()
        new, old = snapshot.view(), base.view() if base is not None else None
        try:
            result = await self.host.reduced(
                lambda stop: _compare(new, old, named[2], limit_bytes, stop)
            )
        finally:
            del self._running[named]
            running.set_result(None)
        self._counts.computed_count += 1
        self._results[named] = result
        while sum(len(kept.data) for kept in self._results.values()) > limit_bytes:
            del self._results[next(iter(self._results))]
        loop.call_later(KEPT_S, self._results.pop, named, None)
        return result


def _compare(
    new: memoryview,
    old: memoryview | None,
    items: Sequence[Item],
    limit_bytes: int,
    stop: Sequence[bool],
) -> _Result:
    """Compare all items; beyond `limit_bytes` of changes, ranges must be read whole."""
    parts, data, changed_bytes, size_bytes = [], [], 0, 0
    for begin, end, element_bytes in items:
        if stop:
            break
        (digest,) = digest_all(new, [(begin, end)])
        delta = Delta(pb.DELTA_FORM_UNSPECIFIED, -1)
        if old is not None:
            delta = make_delta(new[begin:end], old[begin:end], element_bytes)
            changed_bytes += delta.changed_count * element_bytes
        if size_bytes + len(delta.data) > limit_bytes:
            delta = Delta(pb.DELTA_FORM_UNSPECIFIED, delta.changed_count)
        size_bytes += len(delta.data)
        data.append(delta.data)
        parts.append(
            pb.DeltaPart(
                digest=digest,
                form=delta.form,  # type: ignore[arg-type]  # the same numbers
                changed_count=delta.changed_count,
                size_bytes=len(delta.data),
            )
        )
    return _Result(tuple(parts), b"".join(data), changed_bytes)


def _checked(items: Sequence[pb.DeltaItem], size_bytes: int) -> tuple[Item, ...]:
    """The items as tuples. Raises UsageError if too many, or if one exceeds the snapshot."""
    if len(items) > MAX_ITEMS:
        raise UsageError(f"items: {len(items):,}; expected at most {MAX_ITEMS:,}")
    checked = tuple((item.begin_bytes, item.end_bytes, item.element_bytes) for item in items)
    for begin, end, element_bytes in checked:
        whole = element_bytes in ELEMENT_BYTES and (end - begin) % element_bytes == 0
        if not 0 <= begin <= end <= size_bytes or not whole:
            raise UsageError(
                f"items: bytes [{begin}, {end}) of elements of {element_bytes}; expected whole "
                f"elements of 1, 2, 4 or 8 bytes within the snapshot's {size_bytes}"
            )
    return checked
