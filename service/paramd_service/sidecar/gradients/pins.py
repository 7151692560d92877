"""Gradients of one update as snapshots or statistics; equal requests share one capture."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from paramd.errors import DeadlineError, UsageError
from paramd.layout.stats import Runs, by_dtype
from paramd.memory.gradient_program import Notes
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.admission import CALLER
from paramd_service.aio import in_executor
from paramd_service.sidecar import moments
from paramd_service.sidecar.gradients.memory import Places, SlotMemory
from paramd_service.sidecar.gradients.slots import Gradients, rolled_back
from paramd_service.sidecar.snapshots.store import (
    BlockMaker,
    Fill,
    Key,
    Lease,
    Snapshot,
    SnapshotStore,
    copy_spans,
)

Leasing = Callable[[Snapshot, float], Lease]


@dataclass(eq=False, slots=True)
class _Shared:
    """Work that several requests wait for; the last one to leave cancels it."""

    named: Hashable
    task: asyncio.Task[Any]
    release: Callable[[Any], None]
    """Releases the result after the last of them."""
    waiters: int = 0
    released: bool = False


class GradientPins:
    """Gradients of one attachment, as PinSnapshot returns them."""

    def __init__(
        self,
        gradients: Gradients,
        *,
        store: SnapshotStore,
        blocks: BlockMaker,
        executor: Executor,
        lease: Leasing,
        at_point: Callable[[str], None],
    ) -> None:
        """`lease` turns one hold on a snapshot into a lease."""
        self.gradients = gradients
        self._store = store
        self._blocks = blocks
        self._executor = executor
        self._lease = lease
        self._at_point = at_point
        self._loop = asyncio.get_running_loop()
        self._shared: dict[Hashable, _Shared] = {}
        self._has_torch = False

    async def pin(
        self, key: Key, step: int, *, history: int | None = None, lease_s: float, timeout_s: float
    ) -> Lease:
        """Lease the gradients that update `step` of a history (None: the present one) consumes.
        Raises as `Gradients.capture`, and DeadlineError if the update did not come in time."""
        history = self._history(step, history)
        snapshot = self._store.find(key, history=history, step=step)
        if snapshot is None:
            shared = self._join(
                (key, history, step), lambda: self._fill(key, history, step), self._store.drop
            )
            async with self._waiting(shared, step, timeout_s) as filled:
                snapshot = self._store.hold(filled)
        return self._lease(snapshot, lease_s)

    async def reduce(
        self,
        key: Key,
        step: int,
        reduction: pb.Reduction,
        *,
        history: int | None = None,
        timeout_s: float,
    ) -> tuple[list[pb.Stats], Notes]:
        """Statistics, one per item. Raises as `pin`, and UsageError for a bad item."""
        history = self._history(step, history)
        wanted = reduction.SerializeToString(deterministic=True)
        shared = self._join(
            (key, history, step, wanted),
            lambda: self._reduce(key, history, step, wanted),
            lambda _: None,
        )
        async with self._waiting(shared, step, timeout_s) as found:
            answer: tuple[list[pb.Stats], Notes] = found
            return answer

    def _history(self, step: int, wanted: int | None) -> int:
        """The history of a request. Raises AbortedError if a rollback left it."""
        now = self.gradients.history
        if wanted is not None and wanted != now:
            raise rolled_back(step)
        return now

    def _join(
        self,
        named: Hashable,
        work: Callable[[], Coroutine[Any, Any, Any]],
        release: Callable[[Any], None],
    ) -> _Shared:
        """Join the work of that name, started unless it is running."""
        shared = self._shared.get(named)
        if shared is None:
            shared = _Shared(named, self._loop.create_task(work()), release)
            self._shared[named] = shared
            shared.task.add_done_callback(lambda _: self._over(shared))
        return shared

    @asynccontextmanager
    async def _waiting(self, shared: _Shared, step: int, timeout_s: float) -> AsyncIterator[Any]:
        """Wait for shared work and hold its result until the block ends."""
        shared.waiters += 1
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    # Shielded: one timeout must not end the work for the others.
                    found = await asyncio.shield(shared.task)
            except TimeoutError:
                raise DeadlineError(
                    f"update {step} did not begin within {timeout_s:.1f} s; try again"
                ) from None
            yield found
        finally:
            shared.waiters -= 1
            self._over(shared)

    def _over(self, shared: _Shared) -> None:
        """Cancel work without waiters; release its result exactly once."""
        if shared.waiters:
            return
        if self._shared.get(shared.named) is shared:
            del self._shared[shared.named]
        task = shared.task
        if not task.done():
            task.cancel()
        elif not shared.released:
            shared.released = True
            if not task.cancelled() and task.exception() is None:
                shared.release(task.result())

    async def _fill(self, key: Key, history: int, step: int) -> Snapshot:
        # The task inherits the context, and so the caller, of the request that began it.
        who = CALLER.get()
        snapshot = self._store.reserve(key, at_boundary=False, who=who)
        try:
            if snapshot.block is None and snapshot.size_bytes:
                await in_executor(self._executor, partial(self._make_block, snapshot))
            snapshot.fill = Fill.PENDING
            _, snapshot.notes = await self.gradients.capture(
                history, step, key.spans, lambda memory, slot: self._copy(snapshot, memory, slot)
            )
            snapshot.iteration = snapshot.notes.iteration
            snapshot.history, snapshot.step = snapshot.notes.history, step
            snapshot.fill = Fill.FILLED
            return snapshot
        except BaseException:
            self._store.drop(snapshot)
            raise
        finally:
            self._store.uncharge(snapshot, who)

    def _make_block(self, snapshot: Snapshot) -> None:
        # On the thread: if the caller has left, the block is released with the snapshot.
        snapshot.block = self._blocks.make(snapshot.size_bytes)

    def _copy(self, snapshot: Snapshot, memory: SlotMemory, slot: int) -> None:
        for span in copy_spans(snapshot, memory.address(slot)):
            span.copy()
        self._at_point("gradients-copied")

    async def _reduce(
        self, key: Key, history: int, step: int, reduction: bytes
    ) -> tuple[list[pb.Stats], Notes]:
        plain = _plainly_placed(key.spans, reduction)
        if plain is not None:

            def few(memory: SlotMemory, slot: int) -> list[pb.Stats]:
                room = memory.room(slot, 0, key.spans[-1][1] if key.spans else 0)
                found = moments.reduce_runs(room, plain).messages()
                self._at_point("gradients-reduced")
                return found

            return await self.gradients.capture(history, step, key.spans, few)
        if not self._has_torch:
            # Before the slot is armed: loading torch takes seconds.
            await self._loop.run_in_executor(self._executor, _load_torch)
            self._has_torch = True
        placed, with_exponents = _placed(key.spans, reduction)

        def work(memory: SlotMemory, slot: int) -> list[pb.Stats]:
            from paramd_service.sidecar.statistics.reduce import reduce_runs

            room = memory.room(slot, 0, key.spans[-1][1] if key.spans else 0)
            found = reduce_runs(room, placed, with_exponents=with_exponents).messages()
            self._at_point("gradients-reduced")
            return found

        return await self.gradients.capture(history, step, key.spans, work)


def _load_torch() -> None:
    from paramd_service.sidecar.statistics import reduce

    reduce.set_up()
    reduce.warm_up()


def _plainly_placed(spans: tuple[tuple[int, int], ...], reduction: bytes) -> list[Runs] | None:
    """The items by arena byte if they are reduced without torch; None if they are not. Raises as
    `_placed`."""
    if "torch" in sys.modules:
        return None
    wanted = pb.Reduction.FromString(reduction)
    if wanted.with_exponents or any(one.dtype not in moments.ITEM_BYTES for one in wanted.items):
        return None
    runs = _runs_of(spans, wanted, moments.ITEM_BYTES.__getitem__)
    return runs if moments.fits(runs) else None


@functools.lru_cache(maxsize=8)
def _placed(spans: tuple[tuple[int, int], ...], reduction: bytes) -> tuple[list[Runs], bool]:
    """The items of a `Reduction` by arena byte, and whether it wants exponents. Cached: a reader
    requests the same in every update. Raises UsageError if an item is not within a span."""
    from paramd_service.sidecar.statistics.reduce import item_bytes

    wanted = pb.Reduction.FromString(reduction)
    return _runs_of(spans, wanted, item_bytes), wanted.with_exponents


def _runs_of(
    spans: tuple[tuple[int, int], ...], wanted: pb.Reduction, item_bytes: Callable[[str], int]
) -> list[Runs]:
    places = Places(spans)
    found: list[tuple[str, int, int, int]] = []
    for item in wanted.items:
        size_bytes = item.numel * item_bytes(item.dtype)
        at = places.arena_byte(item.begin_bytes, size_bytes) if item.numel >= 0 else None
        if at is None or item.begin_bytes < 0:
            raise UsageError(
                f"items: {item.numel} elements of {item.dtype} from byte {item.begin_bytes} on "
                f"are not within one span of the {places.size_bytes} requested bytes"
            )
        found.append((item.dtype, len(found), at, item.numel))
    return by_dtype(found)
