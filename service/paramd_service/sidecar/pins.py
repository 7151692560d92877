"""Pins of one incarnation: from requested spans to a lease on their bytes at one step.

    pin      an equal snapshot of the current step, else a copy as soon as one fits
    prepare  room for a boundary, which boundaries.py fills

Runs on the event loop. Memory is allocated on an executor, bytes are copied by the copier.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from paramd.errors import AbortedError, ConflictError, TornError
from paramd.memory.arena import is_mirror
from paramd.memory.control_page import (
    Word,
    in_time,
    is_stray,
    label_of,
    settling_of,
    unserved_reason,
)
from paramd.memory.gate import State, resting_state, state_of
from paramd.memory.left import HEADROOM, Room
from paramd.state import Settling
from paramd.v1 import common_pb2
from paramd_service.admission import CALLER, Who
from paramd_service.aio import in_executor, kept, post
from paramd_service.sidecar.boundaries import Boundaries
from paramd_service.sidecar.copying.capture import UNSERVED_NS, CopyJob
from paramd_service.sidecar.copying.copier import Copier
from paramd_service.sidecar.faults import Faults
from paramd_service.sidecar.gradients.pins import GradientPins
from paramd_service.sidecar.gradients.slots import Gradients, rolled_back
from paramd_service.sidecar.kept_states import StandingLabel
from paramd_service.sidecar.owner import AttachedMemory, Ownership
from paramd_service.sidecar.snapshots.moments import Moments, is_moments, is_table
from paramd_service.sidecar.snapshots.store import (
    BlockMaker,
    Fill,
    Key,
    Lease,
    Snapshot,
    SnapshotStore,
    copy_spans,
)

STAND_IN_POLL_S = 0.05
"""Poll interval of a request that waits until the training's own weights are back."""

_Named: TypeAlias = tuple[Key, int, int, bool]
"""Key, history, exact step or 0, and whether changed values are accepted."""


@dataclass(eq=False, slots=True)
class _Filling:
    """A snapshot being filled, and how many requests wait for it."""

    snapshot: Snapshot
    done: asyncio.Future[None]
    at_step: int
    """Exact step requested; 0: any."""
    history: int
    who: Who
    """The caller that started it and is charged for it until it is done."""
    unsettled: bool = False
    waiters: int = 0
    job: CopyJob | None = None
    abandoned: bool = False

    @property
    def named(self) -> _Named:
        """The key under which equal requests find it."""
        return self.snapshot.key, self.history, self.at_step, self.unsettled


class Keeping(ABC):
    """What keeps snapshots that nobody has leased, in a budget of its own. Event loop only."""

    @property
    @abstractmethod
    def idle_bytes(self) -> int:
        """Bytes that nobody holds besides."""

    @abstractmethod
    def sweep(self) -> int | None:
        """Drop what is unused for too long; return when to call again (None: nothing is kept)."""

    @abstractmethod
    def drop_all(self) -> None:
        """Drop all."""

    @abstractmethod
    def close(self) -> None:
        """Drop all, and keep no more."""


class Pins:
    """Snapshots of one attachment."""

    def __init__(
        self,
        attached: AttachedMemory,
        *,
        store: SnapshotStore,
        copier: Copier,
        blocks: BlockMaker,
        executor: Executor,
        faults: Faults,
        room: Room = HEADROOM,
    ) -> None:
        """`room` grants memory for gradients; that of snapshots comes from `blocks`."""
        self.store = store
        self._keeping: list[Keeping] = []
        self.copier = copier
        self.ownership = Ownership.OWNED
        self._attached = attached
        self._blocks = blocks
        self._executor = executor
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._fillings: dict[_Named, _Filling] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self.boundaries = Boundaries(attached, store, copier)
        self.moments = Moments(attached)
        self.boundaries.moments = self.moments
        gradients = Gradients(
            attached, executor=executor, idle_memory_s=store.idle_memory_s, room=room
        )
        copier.on_wake = gradients.woken
        store.check = self.check_true
        self.gradient_pins = GradientPins(
            gradients,
            store=store,
            blocks=blocks,
            executor=executor,
            lease=self._lease,
            at_point=faults.at,
        )

    def report(self, state: common_pb2.RankState) -> None:
        """Add what snapshots take, and the copies that were given up, to the rank's state."""
        state.abandoned_copy_count = self.copier.capture.given_up_count
        state.snapshot_bytes = self.store.used_bytes
        state.snapshot_count = self.store.lease_count

    async def pin(
        self,
        key: Key,
        *,
        lease_s: float,
        timeout_s: float,
        at_step: int = 0,
        history: int | None = None,
        unsettled: bool = False,
    ) -> Lease:
        """Lease the spans' bytes at the current step, or at a future one of a history (None: the
        current history).

        Equal requests share one copy. `unsettled` also accepts parameters changed after their
        update, while training has not continued; such a copy is never shared.

        Raises:
            TornError: The trainer ended inside an update, and no equal snapshot is left.
            ExhaustedError: The snapshot budget or the machine has no room.
            AbortedError: No copy fitted between two updates in time; or `at_step` has passed,
                or belongs to a history that was rolled back.
            ConflictError: The arena is a mirror, whose bytes are of an earlier step, or the
                trainer cannot serve its parameters; the message says why.
        """
        self.sweep()
        if is_mirror(self._attached.page.words):
            if self.ownership is not Ownership.OWNED:
                raise ConflictError(self.ownership.value)
            raise ConflictError(
                "this job's parameters stay in the trainer's own memory and are copied at agreed "
                "boundaries only; pin with at_boundary and schedule one, as summon does"
            )
        if at_step and history not in (None, self._attached.page[Word.REWOUND]):
            raise rolled_back(at_step)
        snapshot = self._found(key, at_step) if not unsettled else None
        if snapshot is None:
            snapshot = await self._join_filling(key, timeout_s, at_step, unsettled)
        return self._lease(snapshot, lease_s)

    async def pin_state(
        self,
        key: Key,
        *,
        lease_s: float,
        timeout_s: float,
        at_step: int,
        history: int | None = None,
    ) -> Lease:
        """Like `pin`, for optimizer state or its table.

        Raises:
            ConflictError: It is not in shared memory; the trainer ended before it was recorded.
            NotFoundError: There is no such state.
        """
        self.moments.check(key.state_key if key.spans else "")
        if self.ownership is not Ownership.OWNED and self._attached.page[Word.SEQ] & 1:
            raise ConflictError(
                f"{self.ownership.value}, before the optimizer's state of its last update was "
                "recorded; read the parameters alone"
            )
        return await self.pin(
            key, lease_s=lease_s, timeout_s=timeout_s, at_step=at_step, history=history
        )

    async def pin_mark(
        self, key: Key, read: Callable[[memoryview], StandingLabel], *, lease_s: float
    ) -> Lease:
        """Lease a mark's bytes, which `read` copies on a thread. Raises as `read`."""
        self.sweep()
        who = CALLER.get()

        def fill() -> StandingLabel:
            if snapshot.block is None and snapshot.size_bytes:
                snapshot.block = self._blocks.make(snapshot.size_bytes)
            return read(snapshot.view())

        # Never shared: by the next request, the name may mean another mark.
        snapshot = self.store.reserve(key, at_boundary=True, who=who)
        try:
            label = await in_executor(self._executor, fill)
            snapshot.step, snapshot.fill = label.step, Fill.FILLED
            # Of an earlier incarnation, whose rollbacks and edits are not counted in this one: -1.
            ours = label.incarnation == key.incarnation
            snapshot.history = label.history if ours else -1
            snapshot.edits = label.edits_here if ours else -1
            # Tells marks of one name apart, if not all ranks have the same.
            snapshot.token = label.lineage
        except BaseException:
            self.store.drop(snapshot)
            raise
        finally:
            self.store.uncharge(snapshot, who)
        return self._lease(snapshot, lease_s)

    def _found(self, key: Key, at_step: int) -> Snapshot | None:
        page = self._attached.page
        if at_step:
            # The present step may have been edited since; a kept snapshot is then an earlier state.
            settled = page[Word.STEP] == at_step and not page[Word.SEQ] & 1
            proof = page[Word.SEQ] if settled else None
            history = page[Word.REWOUND]
            return self.store.find(key, history=history, step=at_step, proof=proof)
        if self.ownership is Ownership.TORN:
            return self.store.find(key)
        if not page[Word.SEQ] & 1:
            state: State | None = state_of(page)
        else:
            # With a live trainer, a resting state needs a check after the copy: copy again.
            state = resting_state(page) if self.copier.capture.trainer_ended else None
        if state is None or is_stray(page.words, state.proof):
            return None
        return self.store.find(key, proof=state.proof)

    def settling(self, snapshot: Snapshot) -> Settling:
        """How far the snapshot's state had come.

        A copy that was made in the microseconds after its state had settled does not know it yet.
        """
        words = self._attached.page.words
        if snapshot.settling is Settling.UNKNOWN and snapshot.proof == words[Word.SEQ]:
            moment = in_time(snapshot.step, rewound=snapshot.history)
            snapshot.settling = settling_of(words, moment, rests=False)
        return snapshot.settling

    def check_true(self, snapshot: Snapshot) -> None:
        """Raise AbortedError if the trainer has since found that the bytes mix two states."""
        if snapshot.is_true:
            return
        # Read first: if the state was over by then, the result below is final.
        over = self._attached.page[Word.SEQ] != snapshot.proof
        if not is_stray(self._attached.page.words, snapshot.proof):
            snapshot.is_true = over
        else:
            raise AbortedError(
                f"parameters changed while step {snapshot.step} was read, outside any update; try "
                "again, and put what changes them into attachment.update()"
            )

    async def prepare(self, key: Key, *, with_buffers: bool, lease_s: float) -> Lease:
        """Lease room for the spans, to be filled at an agreed boundary (boundaries.py).

        Raises:
            ConflictError: The trainer has ended, so no boundary will come; or the training's
                weights are swapped out.
            ExhaustedError: As `pin`.
        """
        self.sweep()
        if self.ownership is not Ownership.OWNED:
            raise ConflictError(f"no further boundary: {self.ownership.value}")
        await self._while_others_stand_in()
        who = CALLER.get()
        snapshot = self.store.reserve(key, at_boundary=True, with_buffers=with_buffers, who=who)
        try:
            try:
                # An allocation cannot be cancelled: its own hold keeps the block from leaking.
                await asyncio.shield(kept(self._tasks, self._make_block(self.store.hold(snapshot))))
            except BaseException:
                self.store.drop(snapshot)
                raise
            return self._lease(snapshot, lease_s)
        finally:
            self.store.uncharge(snapshot, who)

    def trainer_ended(self, ownership: Ownership) -> None:
        """End what waits for a boundary, and if torn, copies too."""
        self.ownership = ownership
        self.boundaries.end(ownership.value)
        self.gradient_pins.gradients.end(ConflictError(f"no further update: {ownership.value}"))
        self.store.keep_for_ever()
        # Before `give_up` wakes the copier: a resting state now counts without another look.
        self.copier.capture.trainer_ended = True
        self.copier.give_up(ownership.value, jobs_too=ownership is Ownership.TORN)

    def keep_with(self, keeping: Keeping) -> None:
        """Sweep and close what keeps snapshots beside the leases, too."""
        self._keeping.append(keeping)

    def sweep(self) -> None:
        """End overdue leases, free idle memory, and schedule the next sweep."""
        due_ns = min(
            (
                due
                for due in (*(one.sweep() for one in self._keeping), self.store.expire())
                if due is not None
            ),
            default=None,
        )
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        if due_ns is not None:
            delay_s = max(0.0, due_ns / 1e9 - self._loop.time())
            self._sweep_timer = self._loop.call_later(min(delay_s, 3600.0), self.sweep)

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for the next reader or follower, which nobody holds."""
        gradients_bytes = self.gradient_pins.gradients.idle_bytes
        if not self.store.gives_idle:
            return gradients_bytes
        kept_bytes = sum(one.idle_bytes for one in self._keeping)
        return self.store.kept_bytes + kept_bytes + gradients_bytes

    def take_idle(self) -> list[Callable[[], object]]:
        """Take away what nobody holds; return what frees it, on any thread."""
        for keeping in self._keeping:
            keeping.drop_all()
        freeing: list[Callable[[], object]] = [block.close for block in self.store.take_idle()]
        freeing += self.gradient_pins.gradients.take_idle()
        self.sweep()
        return freeing

    async def close(self) -> None:
        """End all leases and the copying thread."""
        self._closing = True
        self.boundaries.end("the run has ended")
        await self.gradient_pins.gradients.close()
        # Before the store frees memory that the copier may write to.
        await self._loop.run_in_executor(self._executor, self.copier.stop)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for keeping in self._keeping:
            keeping.close()
        self.store.close()
        self.sweep()
        self.moments.close()

    def _lease(self, snapshot: Snapshot, lease_s: float) -> Lease:
        try:
            lease = self.store.lease(snapshot, lease_s, CALLER.get())
        except BaseException:
            self.store.drop(snapshot)
            raise
        self.sweep()
        return lease

    async def _join_filling(
        self, key: Key, timeout_s: float, at_step: int, unsettled: bool
    ) -> Snapshot:
        """Hold a snapshot of `key` whose filling ends after this call begins."""
        if self.ownership is Ownership.TORN:
            raise TornError(
                f"{self.ownership.value}, and no equal snapshot of an earlier step is "
                'left. Start the training again: with resume="auto" it continues from what '
                "all ranks still have in memory, otherwise from its last checkpoint"
            )
        history = self._attached.page[Word.REWOUND]
        filling = self._fillings.get((key, history, at_step, unsettled))
        if filling is None or filling.abandoned:
            filling = self._begin_filling(key, at_step, unsettled)
        filling.waiters += 1
        snapshot = self.store.hold(filling.snapshot)
        try:
            async with asyncio.timeout(timeout_s):
                # Shielded: others may share the copy; the last waiter to leave abandons it.
                await asyncio.shield(filling.done)
        except BaseException as error:
            self.store.drop(snapshot)
            if isinstance(error, TimeoutError):
                if not unsettled and label_of(self._attached.page):
                    raise self._unserved(unserved_reason(self._attached.page)) from None
                raise AbortedError(self._why_not_copied(filling, timeout_s)) from None
            raise
        finally:
            filling.waiters -= 1
            if filling.waiters == 0 and not filling.done.done():
                self._abandon(filling)
        return snapshot

    def _begin_filling(self, key: Key, at_step: int, unsettled: bool) -> _Filling:
        who = CALLER.get()
        snapshot = self.store.reserve(key, at_boundary=False, who=who)
        history = self._attached.page[Word.REWOUND]
        done = self._loop.create_future()
        filling = _Filling(snapshot, done, at_step, history, who, unsettled)
        # Before it is filled, so that nobody shares it.
        snapshot.private = unsettled
        self._fillings[filling.named] = filling
        kept(self._tasks, self._fill(filling))
        return filling

    async def _fill(self, filling: _Filling) -> None:
        snapshot = filling.snapshot
        try:
            await self._make_block(self.store.hold(snapshot))
            self._faults.at("pin-prepared")
            state = await self._copy(filling)
            snapshot.step, snapshot.edits = state.step, state.edits
            snapshot.iteration, snapshot.unsettled = state.iteration, state.unsettled
            snapshot.label, snapshot.history = state.label, state.history
            snapshot.changes, snapshot.settling = state.changes, state.settling
            # 0: never share a state that may have been changed at rest.
            snapshot.proof = state.proof if not filling.unsettled else 0
            if is_moments(snapshot.key) and not is_table(snapshot.key):
                snapshot.optimizer = self.moments.facts_of(snapshot)
            snapshot.fill = Fill.FILLED
            filling.done.set_result(None)
        except Exception as error:
            filling.done.set_exception(error)
            filling.done.exception()  # retrieved, or asyncio logs it if all waiters have left
        finally:
            self._forget(filling)
            self.moments.forget(snapshot)
            self.store.uncharge(snapshot, filling.who)
            self.store.drop(snapshot)

    async def _copy(self, filling: _Filling) -> State:
        if filling.abandoned or self._closing:
            raise AbortedError("the copy was cancelled before it began; try again")
        copied: asyncio.Future[State | None] = self._loop.create_future()
        filling.snapshot.fill = Fill.PENDING
        snapshot = filling.snapshot
        state_too = is_moments(snapshot.key)

        def ended(state: State | None) -> None:
            filling.abandoned = True  # whoever joined it now might be told of an earlier update
            post(self._loop, copied.set_result, state)

        filling.job = CopyJob(
            copy_spans(snapshot, self._attached.arena.address) if not state_too else (),
            ended,
            at_step=filling.at_step,
            history=filling.history,
            unsettled=filling.unsettled,
            prepare=self.moments.filling([snapshot]) if state_too else None,
        )
        self.copier.submit(filling.job)
        state = await copied
        if state is None:
            if self.ownership is Ownership.TORN:
                raise TornError(self.ownership.value)
            if filling.job.refused:
                raise self._unserved(filling.job.refused)
            if filling.at_step and self._attached.page[Word.REWOUND] != filling.history:
                raise rolled_back(filling.at_step)
            if state_too and self.moments.missed(filling.at_step):
                raise ConflictError(self.moments.missed(filling.at_step))
            if filling.at_step and self._attached.page[Word.STEP] >= filling.at_step:
                raise AbortedError(
                    f"step {filling.at_step} passed before it was copied; the rank has finished "
                    f"{self._attached.page[Word.STEP]} updates, request a later one"
                )
            raise AbortedError("the copy was given up; try again")
        return state

    async def _while_others_stand_in(self) -> None:
        """Wait briefly for the training's own weights, since no boundary comes before. Raises
        ConflictError if they are still swapped out."""
        page, until_s = self._attached.page, self._loop.time() + UNSERVED_NS / 1e9
        while label_of(page):
            if self._loop.time() > until_s:
                raise self._unserved(unserved_reason(page))
            await asyncio.sleep(STAND_IN_POLL_S)

    @staticmethod
    def _unserved(reason: str) -> ConflictError:
        return ConflictError(f"the parameters cannot be served: {reason}")

    def _forget(self, filling: _Filling) -> None:
        if self._fillings.get(filling.named) is filling:
            del self._fillings[filling.named]

    def _abandon(self, filling: _Filling) -> None:
        filling.abandoned = True
        self._forget(filling)
        if filling.job is not None:
            self.copier.cancel(filling.job)

    async def _make_block(self, snapshot: Snapshot) -> None:
        """Allocate the snapshot's memory if needed; always drop one holder."""
        try:
            if snapshot.block is None and snapshot.size_bytes:
                make = partial(self._blocks.make, snapshot.size_bytes, self._attached.device)
                snapshot.block = await self._loop.run_in_executor(self._executor, make)
        finally:
            self.store.drop(snapshot)

    def _why_not_copied(self, filling: _Filling, timeout_s: float) -> str:
        job, page = filling.job, self._attached.page
        if job is None:
            return f"{timeout_s:.1f} s were not enough to allocate the snapshot; allow more time"
        if job.changed:
            return (
                f"parameters were changed after update {page[Word.REST_STEP]}, and training has "
                "not continued since: weights swapped in, merged or averaged for an evaluation? "
                "Try again later, or read them as they are with unsettled=True (--unsettled)"
            )
        if job.unseen is not None:
            return (
                "the rank is idle after an update and did not confirm the copy: other tensors "
                "stand in for the parameters, or its Python interpreter is blocked (a debugger, a "
                "long C call). Try again later"
            )
        if job.attempts:
            why = self.copier.capture.explain(job.size_bytes, job.longest_ns)
            return f"no copy ended within {timeout_s:.1f} s in {job.attempts} attempts: {why}"
        doing = "did not reach a boundary"
        if page[Word.SEQ] & 1:
            doing = "rests after an update" if page[Word.REST] else "is inside an update"
        return (
            f"no copy could begin within {timeout_s:.1f} s: the rank {doing}; allow more time, and "
            "check the training if this persists"
        )
