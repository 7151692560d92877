"""Runs the state machine of one edit: its actions become calls to sidecars, answers its events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from paramd.errors import ConflictError, NotFoundError, ParamdError, asked_by
from paramd.layout.edits.ops import EditState
from paramd.layout.edits.plan import PlannedOp
from paramd.layout.select import NameIndex
from paramd.layout.stats import stats_of
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.aio import kept, stopped
from paramd_service.control.mesh.coordinator import BoundaryAction, BoundaryRequest
from paramd_service.control.mesh.registry import MeshView, listed, waited_for
from paramd_service.control.mesh.sidecars import SidecarCalls, address_of, on_all
from paramd_service.control.store.edits import EditRow
from paramd_service.control.store.engine import StoreError
from paramd_service.edits.machine import (
    Applied,
    CallOff,
    EditMachine,
    Event,
    Forget,
    NotReached,
    Outcome,
    Persist,
    Reach,
    Reached,
    Reported,
    Show,
    Shown,
    Staged,
    Unreported,
    Withdraw,
)
from paramd_service.edits.spec import merged, replicas_text

STAGE_S = 60.0
PREVIEW_S = 60.0
AGAIN_S = 0.1
"""First pause before a rank in doubt or unreachable is asked again; doubles up to MAX_AGAIN_S."""
MAX_AGAIN_S = 2.0
STORE_AGAIN_S = 1.0
FORGET_S = 600.0
"""How long a rank is asked to forget its staged data: after that it does so by itself."""

_FATES = frozenset(one.value for one in Outcome)

log = logging.getLogger("paramd.control.edits")


async def stage(
    calls: SidecarCalls, rank: int, address: str, manifest: pb.EditManifest
) -> pb.EditProgress:
    """Stage the manifest without data; clients upload data to the sidecars themselves."""
    parts = [pb.StageEditRequest(manifest=manifest)]
    answer: pb.StageEditResponse = await calls.ask(
        rank, address, parts, timeout_s=STAGE_S, method="StageEdit"
    )
    return answer.progress


async def withdrawn(calls: SidecarCalls, rank: int, address: str, boundary: int) -> Outcome:
    """Withdraw a boundary request; return its outcome."""
    answer = await calls.ask(rank, address, pb.WithdrawBoundaryRequest(boundary=boundary))
    # A fate added by a newer sidecar version proves nothing: ask again.
    return Outcome(answer.fate) if answer.fate in _FATES else Outcome.IN_DOUBT


def applied_of(answer: pb.GetEditResponse) -> Applied | None:
    """How a rank applied an edit; None if it has not."""
    progress = answer.progress
    if progress.phase != pb.EDIT_PHASE_APPLIED:
        return None
    return Applied(
        boundary=progress.boundary,
        token=progress.token,
        step=answer.header.step,
        edits=answer.header.edits,
        manifest_digest=progress.manifest_digest,
        data_digests=tuple(progress.data_digests),
        stop_ns=progress.stop_ns,
    )


@dataclass(eq=False)
class EditRun:
    """Drives one edit until it has ended. Use on one event loop; `close` when done."""

    machine: EditMachine
    row: EditRow
    _: KW_ONLY
    calls: SidecarCalls
    view: Callable[[], MeshView]
    save: Callable[[EditRow], Awaitable[None]]
    on_change: Callable[[EditRow], None]
    """Called with each new row, after it is saved."""
    touched_s: float = field(default_factory=time.monotonic)
    reach_s: float = 60.0
    """Time for ReachBoundary, in seconds."""

    def __post_init__(self) -> None:
        """Start driving."""
        self._changed = asyncio.Event()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses: dict[int, float] = {}
        self._loop = asyncio.create_task(self._run(), name="paramd-edit")
        self._loop.add_done_callback(self._ended)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs for it: it waits to be staged or committed."""
        return self.machine.state is not EditState.COMMITTED and not self._tasks

    def feed(self, event: Event) -> None:
        """Queue an event for the machine."""
        self.touched_s = time.monotonic()
        self._events.put_nowait(event)

    async def until(self, *states: EditState) -> EditRow:
        """Wait until the edit is in one of the states or has ended; return its row."""
        while not (self.row.ended_s is not None or self.row.state in states):
            await self._changed.wait()
        return self.row

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background; `close` cancels it."""
        kept(self._tasks, work).add_done_callback(self._ended)

    def tell_who_waits(self) -> None:
        """While it is COMMITTED, name the rank that it waits for in the row; not saved."""
        if self.row.state == EditState.COMMITTED:
            machine = self.machine
            told = f"being called off ({machine.reason}), " if machine.calling_off else ""
            self.row = replace(self.row, reason=f"{told}waits for {waited_for(self.view())}")

    def describe(self, **detail: object) -> None:
        """Add to the row's detail; saved with the next state."""
        self.row = replace(self.row, detail={**self.row.detail, **detail})

    async def finish(self) -> None:
        """Wait for the background work of an edit that has ended, then close."""
        try:
            while self._tasks:
                await asyncio.wait(set(self._tasks))
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop driving. A COMMITTED edit stays so in the store for the next control plane."""
        await stopped(self._loop, *self._tasks)

    async def _run(self) -> None:
        while True:
            event = await self._events.get()
            for action in self.machine.handle(event):
                if not isinstance(action, Persist):
                    self.start(self._do(action))
                elif not await self._persist():
                    why = "the store could not be written; no rank was asked to apply it"
                    self.feed(CallOff(why))
                    break

    async def _persist(self) -> bool:
        """Save the machine's state; any but COMMITTED is retried until it succeeds. False: a commit
        was not saved, so no rank may be asked."""
        machine = self.machine
        now = replace(
            self.row,
            state=machine.state.value,
            reason=machine.reason if machine.ended else "",
            ended_s=time.time() if machine.ended else None,
            boundary=machine.boundary,
            token=machine.token,
            step=machine.step,
            edits=machine.edits,
            stop_ns=machine.stop_ns,
        )
        # STAGED is not saved: after a restart the ranks are asked again anyway.
        while machine.state is not EditState.STAGED:
            try:
                await self.save(now)
                break
            except StoreError as error:
                if machine.state is EditState.COMMITTED:
                    return False
                log.error("cannot save edit %s as %s: %s", now.id, now.state, error)
                await asyncio.sleep(STORE_AGAIN_S)
        self.row = replace(now, detail=self.row.detail)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self.on_change(self.row)
        return True

    async def _do(self, action: Reach | Withdraw | Show | Forget) -> None:
        event: Event
        try:
            match action:
                case Forget(rank):
                    return await self._forget(rank)
                case Reach(rank):
                    event = await self._reach(rank)
                case Withdraw(rank, later):
                    event = await self._withdraw(rank, later=later)
                case Show(rank):
                    event = await self._show(rank)
        except Exception:
            # The machine waits for an answer to every request.
            log.exception("edit %s, rank %d: a fault of paramd", self.row.id, action.rank)
            event = Unreported(action.rank)
            if isinstance(action, Reach):
                event = NotReached(action.rank, f"rank {action.rank}: a fault of paramd")
        self.feed(event)

    async def _reach(self, rank: int) -> Event:
        machine = self.machine
        request = BoundaryRequest(
            number=machine.boundary,
            token=machine.token,
            action=BoundaryAction.EDIT,
            edit_id=self.row.id,
        )
        try:
            address = address_of(self.view(), rank)
            answer = await self.calls.reach(rank, address, request, (), self.reach_s)
        except ParamdError as error:
            return NotReached(rank, str(error))
        if answer.captured:
            return Reached(rank)
        return NotReached(rank, f"rank {rank}: {answer.reason or 'no reason given'}")

    async def _withdraw(self, rank: int, *, later: bool) -> Event:
        if later:
            pause_s = self._pauses.get(rank, AGAIN_S)
            self._pauses[rank] = min(2 * pause_s, MAX_AGAIN_S)
            await asyncio.sleep(pause_s)
        try:
            address = address_of(self.view(), rank)
            fate = await withdrawn(self.calls, rank, address, self.machine.boundary)
            return Reported(rank, fate)
        except ParamdError:
            return Unreported(rank)

    async def _show(self, rank: int) -> Event:
        try:
            address = address_of(self.view(), rank)
            answer = await self.calls.ask(rank, address, pb.GetEditRequest(edit_id=self.row.id))
        except NotFoundError:
            return Shown(rank, None)
        except ParamdError:
            return Unreported(rank)
        if answer.progress.undo_refusal and not self.row.detail.get("undo_refusal"):
            self.describe(undo_refusal=f"rank {rank}: {answer.progress.undo_refusal}")
        if answer.progress.told and not self.row.detail.get("warning"):
            self.describe(warning=answer.progress.told)
        return Shown(rank, applied_of(answer))

    async def _forget(self, rank: int) -> None:
        # A sidecar that was killed takes seconds to return, and then still has the data.
        pause_s, end_s = AGAIN_S, time.monotonic() + FORGET_S
        while time.monotonic() < end_s:
            try:
                address = address_of(self.view(), rank)
                if self.machine.boundary:
                    await withdrawn(self.calls, rank, address, self.machine.boundary)
                await self.calls.ask(rank, address, pb.DropEditRequest(edit_id=self.row.id))
                return
            except ParamdError as error:
                log.debug("edit %s at rank %d: %s", self.row.id, rank, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_AGAIN_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("edit %s: %r", self.row.id, error, exc_info=error)


async def verify_staged(
    driver: EditRun, calls: SidecarCalls, view: MeshView, manifest: pb.EditManifest
) -> None:
    """Verify that all ranks have the whole edit; stage it on ranks that need no data.

    Raises:
        ConflictError: When data is missing on a rank, or was uploaded with another token.
    """
    author = str(driver.row.detail.get("author", ""))

    async def progress(rank: int, address: str) -> pb.EditProgress:
        try:
            request = pb.GetEditRequest(edit_id=manifest.edit_id)
            answer: pb.GetEditResponse = await calls.ask(rank, address, request)
            return answer.progress
        except NotFoundError:
            # Uploaders contact only the ranks that take data; the others are staged here.
            asked_by.set(author)
            return await stage(calls, rank, address, manifest)

    found = await on_all(view, progress)
    lacking = [rank for rank, one in found.items() if one.phase == pb.EDIT_PHASE_STAGING]
    if lacking:
        one = found[lacking[0]]
        raise ConflictError(
            f"ranks {listed(lacking)} lack part of its data (rank {lacking[0]}: "
            f"{one.staged_bytes:,} of {one.size_bytes:,} bytes); upload the rest first"
        )
    strange = [rank for rank, one in found.items() if one.size_bytes and one.author != author]
    if strange:
        raise ConflictError(
            f"the data on ranks {listed(strange)} was uploaded with another token than the one "
            "that created the edit; abort it and create a new one"
        )
    feed_staged(driver, found)


async def preview_all(
    calls: SidecarCalls,
    view: MeshView,
    edit_id: str,
    index: NameIndex,
    ops: Sequence[PlannedOp],
    *,
    timeout_s: float = PREVIEW_S,
) -> dict[str, Any]:
    """Statistics {"before", "after"} of a staged edit over all ranks, and a "warning" where
    replicas were not equal before. Raises as `on_all`."""
    request = pb.PreviewEditRequest(edit_id=edit_id)
    found = await on_all(
        view, lambda rank, address: calls.ask(rank, address, request, timeout_s=timeout_s)
    )
    before = {rank: [stats_of(one) for one in answer.before] for rank, answer in found.items()}
    after = {rank: [stats_of(one) for one in answer.after] for rank, answer in found.items()}
    told = {"before": merged(index, ops, before), "after": merged(index, ops, after)}
    why = replicas_text(index, ops, before)
    return told | {"warning": why} if why else told


def feed_staged(driver: EditRun, found: dict[int, pb.EditProgress]) -> None:
    for rank, progress in found.items():
        driver.feed(Staged(rank, progress.manifest_digest, tuple(progress.data_digests)))
