"""The open edits of one incarnation: staging, commit in turn, timeouts, recovery on restart."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from paramd.errors import ParamdError
from paramd.layout.edits.ops import EditState
from paramd.layout.edits.plan import PlannedOp, overlap
from paramd.layout.select import NameIndex
from paramd.mesh.edits.calls import PauseState, in_effect
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.aio import kept, stopped
from paramd_service.control.access.authority import Principal
from paramd_service.control.mesh.coordinator import BoundaryAction, token_of
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.mesh.sidecars import on_all
from paramd_service.control.records.audit import Action
from paramd_service.control.records.records import SELF, Records
from paramd_service.control.store.edits import EditRow
from paramd_service.control.store.engine import StoreError
from paramd_service.edits.machine import (
    CallOff,
    Commit,
    EditMachine,
    IncarnationEnded,
    Restarted,
    SameData,
    no_data,
)
from paramd_service.edits.pauses import Pause
from paramd_service.edits.runner import EditRun, feed_staged, preview_all, stage
from paramd_service.edits.spec import EditConfig, Planned, ops_of

LOAD_AGAIN_S = 1.0
FORGOTTEN_S = 10.0
"""How long a rollback or an undo waits until ranks have forgotten the one staged before it."""
OPEN_STATES = (EditState.STAGING, EditState.STAGED, EditState.COMMITTED)
_NS = 1e9

log = logging.getLogger("paramd.control.edits")


@dataclass(eq=False)
class IncarnationEdits:
    """Use on one event loop. `begin` comes first, `close` last."""

    mesh: Incarnation
    records: Records
    config: EditConfig
    _: KW_ONLY
    on_change: Callable[[EditRow], None]
    on_pause: Callable[[str, PauseState], None]

    def __post_init__(self) -> None:
        self._loading: asyncio.Task[None] | None = None
        self._committing: set[str] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self.open: dict[str, EditRun] = {}
        """Drivers of edits that have not ended, by id."""
        self.pause = Pause(self.mesh, self.records, agree_s=self.agree_s, on_change=self.on_pause)

    def begin(self) -> None:
        """Resolve the edits that an earlier control plane left open; no turns are given before."""
        self._loading = asyncio.create_task(self._load(), name="paramd-edits-load")

    def drive(self, row: EditRow, check: SameData) -> EditRun:
        """Start driving an edit from the state in its row."""
        machine = EditMachine(
            world_size=self.mesh.bootstrap.world_size,
            manifest_digest=bytes.fromhex(row.digest),
            same_data=check,
            # STAGED is never trusted from the store: sidecars may have dropped the staged data.
            state=EditState.COMMITTED if row.state == EditState.COMMITTED else EditState.STAGING,
            boundary=row.boundary,
            token=row.token,
        )
        driver = self.open[row.id] = EditRun(
            machine,
            row,
            calls=self.mesh.calls,
            view=self.mesh.registry.view,
            save=self.records.edits.save,
            on_change=self._changed,
        )
        return driver

    def is_committing(self, edit_id: str) -> bool:
        """Whether `commit` is running for it: waiting for its turn, or in it."""
        return edit_id in self._committing

    async def stage_and_commit(
        self, driver: EditRun, by: Principal, planned: Planned, index: NameIndex
    ) -> None:
        """Stage an edit without data on all ranks, then commit it; a dry run stops at preview."""
        try:
            await self._room_for(driver, planned.manifest)
            view = self.mesh.coordinator.joined()
            manifest = planned.manifest
            staged = await on_all(view, lambda rank, at: stage(self.mesh.calls, rank, at, manifest))
            feed_staged(driver, staged)
            if driver.row.detail.get("dry_run"):
                found = await preview_all(self.mesh.calls, view, driver.row.id, index, planned.ops)
                driver.describe(**found)
                driver.feed(CallOff("DRY RUN: nothing was changed"))
                return
        except Exception as error:
            driver.feed(CallOff(_why(error)))
            if isinstance(error, ParamdError):
                return
            raise
        await driver.until(EditState.STAGED, EditState.COMMITTED)
        if planned.manifest.HasField("rollback"):
            await self._commit_held(driver, by, index)
        else:
            await self.commit(driver, by, index, planned.ops)

    async def _room_for(self, driver: EditRun, manifest: pb.EditManifest) -> None:
        """Wait for ranks to forget what they have room for only once: the last rollback, and dry
        runs of the same undo, which claim the old values as this one does."""
        if not (manifest.HasField("rollback") or manifest.undo_of):
            return
        tried = [
            one
            for one in self.open.values()
            # Only earlier ones: two must not wait for each other.
            if manifest.undo_of
            and one.row.undo_of == manifest.undo_of
            and one.row.detail.get("dry_run")
            and one.row.number < driver.row.number
        ]
        for one in tried:
            with suppress(TimeoutError):
                await asyncio.wait_for(one.until(), FORGOTTEN_S)
        if self._ending:
            await asyncio.wait(set(self._ending), timeout=FORGOTTEN_S)

    async def _commit_held(self, driver: EditRun, by: Principal, index: NameIndex) -> None:
        """Commit a rollback, which trainers promise only while they are paused."""
        try:
            async with self.pause.during(by):
                await self.commit(driver, by, index, ())
        except ParamdError as error:
            driver.feed(CallOff(str(error)))

    async def commit(
        self, driver: EditRun, by: Principal, index: NameIndex, ops: tuple[PlannedOp, ...]
    ) -> None:
        """Commit a staged edit and wait for its end, inside an audit record. Idempotent."""
        row = driver.row
        if row.id in self._committing or row.state != EditState.STAGED:
            return
        self._committing.add(row.id)
        try:
            method = "edit.undo" if row.undo_of else "edit.commit"
            async with self.records.recorded(by, method, audit_detail(row), self.mesh) as entry:
                driver.describe(committed_by=by.name)
                await self._ranges(driver, index, ops)
                await self._in_turn(driver, index, ops)
                entry.outcome(driver.row.state.lower(), **_outcome(driver.row))
        except Exception as error:
            # Abort on any error, or the edit stays open with no driver.
            driver.feed(CallOff(_why(error)))
            if not isinstance(error, ParamdError):
                raise
        finally:
            self._committing.discard(row.id)

    def tick(self, now_s: float) -> None:
        """Abort edits left uncommitted for staged_s; have committed ones name the rank they wait
        for. `now_s` is monotonic."""
        for edit_id, driver in list(self.open.items()):
            driver.tell_who_waits()
            waits = driver.machine.state in (EditState.STAGING, EditState.STAGED)
            late = now_s - driver.touched_s > self.config.staged_s
            if waits and late and edit_id not in self._committing:
                reason = f"it was not committed within {self.config.staged_s:g} s"
                driver.feed(CallOff(reason))
                detail = {"id": edit_id, "staged_by": driver.row.actor, "reason": reason}
                self.records.note(self.mesh, "edit.abort", detail)

    def incarnation_ended(self, reason: str) -> None:
        """End every open edit: the trainers are gone, and their agreements with them."""
        for driver in self.open.values():
            driver.feed(IncarnationEnded(reason))

    async def close(self) -> None:
        """Stop all drivers; the next control plane resolves COMMITTED edits."""
        await stopped(self._loading)
        await stopped(*self._ending)
        for driver in list(self.open.values()):
            await driver.close()

    def agree_s(self, view: MeshView) -> float:
        """Seconds the trainers have to agree: agree_s plus four of the slowest rank's steps."""
        slowest_ns = max((report.state.step_time_ns for report in view.joined), default=0)
        return self.config.agree_s + 4 * slowest_ns / _NS

    async def changed_since(
        self, index: NameIndex, done: EditRow, ops: Sequence[PlannedOp]
    ) -> EditRow | None:
        """The newest edit after `done` that overlaps `ops` and is still in effect. If that was
        undone and redone, the edit that redid it."""
        since = await self.records.edits.of_job(
            done.job, (EditState.APPLIED,), incarnation=done.incarnation
        )
        own = pb.EditManifest.FromString(done.manifest)
        for first, last in in_effect([row for row in since if row.edits > done.edits]):
            if touches(index, own, ops, pb.EditManifest.FromString(first.manifest)):
                return last
        return None

    async def _in_turn(self, driver: EditRun, index: NameIndex, ops: tuple[PlannedOp, ...]) -> None:
        async with self.mesh.coordinator.turn() as turn:
            if reason := await self._why_not_now(driver.row, turn.view, index, ops):
                driver.feed(CallOff(reason))
            elif driver.machine.state is EditState.STAGED:
                machine = driver.machine
                digests = [machine.manifest_digest, *machine.data_digests]
                generation = self.mesh.terms.generation
                token = token_of(generation, turn.number, BoundaryAction.EDIT, digests)
                driver.reach_s = self.agree_s(turn.view)
                driver.feed(Commit(turn.number, token))
            await driver.until()

    async def _why_not_now(
        self, row: EditRow, view: MeshView, index: NameIndex, ops: tuple[PlannedOp, ...]
    ) -> str:
        """Why the edit can no longer be committed, or empty; checked while holding the turn."""
        wanted = row.detail.get("if_step")
        # The trainers compare if_step themselves when they agree; this only fails sooner.
        if wanted is not None and (moved := await self._moved(view, wanted)):
            return moved
        if not row.undo_of or row.detail.get("force"):
            return ""
        done = await self.records.edits.find(row.undo_of)
        if done is None or not (later := await self.changed_since(index, done, ops)):
            return ""
        return (
            f"edit {later.id} by {later.actor} changed some of the same elements while this undo "
            "waited for its turn; undo that one first, or pass force=true to discard its changes"
        )

    async def _moved(self, view: MeshView, wanted: int) -> str:
        request = pb.GetStateRequest()
        found = await on_all(view, lambda rank, at: self.mesh.calls.ask(rank, at, request))
        moved = {rank: one.header.step for rank, one in found.items() if one.header.step > wanted}
        if not moved:
            return ""
        rank = min(moved)
        return (
            f"if_step is {wanted}, but rank {rank} is at step {moved[rank]} already; pause "
            "training first, then edit at the step of the pause"
        )

    async def _ranges(self, driver: EditRun, index: NameIndex, ops: tuple[PlannedOp, ...]) -> None:
        """Add statistics before and after for the audit if they arrive within range_s."""
        row, config = driver.row, self.config
        if row.detail.get("before"):
            driver.describe(before=None, after=None)  # a preview's, of an earlier step
        if not ops or not config.range_s or row.size_bytes > config.range_bytes:
            return
        view = self.mesh.registry.view()
        asking = preview_all(self.mesh.calls, view, row.id, index, ops, timeout_s=config.range_s)
        with suppress(ParamdError):
            driver.describe(**await asking)

    async def _load(self) -> None:
        while True:
            with suppress(StoreError):
                async with self.mesh.coordinator.pause():
                    rows = await self.records.edits.of_job(self.mesh.job, OPEN_STATES)
                    resolving = [driver for row in rows if (driver := self._take_up(row))]
                    for driver in resolving:
                        await driver.until()
                        await self.records.audit.event(self._resolved(driver.row))
                return
            await asyncio.sleep(LOAD_AGAIN_S)

    def _take_up(self, row: EditRow) -> EditRun | None:
        """Drive an edit left open by an earlier control plane; None if nothing must be resolved."""
        if row.incarnation > self.mesh.number or row.id in self.open:
            return None
        driver = self.drive(row, no_data)
        if row.incarnation < self.mesh.number:
            driver.feed(IncarnationEnded(f"run {row.incarnation} ended"))
            return driver
        if row.state != EditState.COMMITTED:
            return None
        self.mesh.coordinator.used(row.boundary)
        driver.feed(Restarted())
        return driver

    def _changed(self, row: EditRow) -> None:
        if row.ended_s is not None and (driver := self.open.pop(row.id, None)) is not None:
            # Its background calls (Forget on the ranks) still run to their end.
            kept(self._ending, driver.finish(), "paramd-edit-end")
        self.on_change(row)

    def _resolved(self, row: EditRow) -> Action:
        return Action(
            actor=SELF,
            role="",
            method="edit.resolve",
            job=row.job,
            incarnation=row.incarnation,
            step=row.step,
            detail={**audit_detail(row), "state": row.state, **_outcome(row)},
        )


def touches(
    index: NameIndex, one: pb.EditManifest, ops: Sequence[PlannedOp], other: pb.EditManifest
) -> bool:
    """Whether an edit, whose ops are `ops`, and a later one change some of the same state."""
    if one.HasField("rollback") or other.HasField("rollback"):
        return True
    if one.HasField("hyperparameters") or other.HasField("hyperparameters"):
        mine, its = one.hyperparameters, other.hyperparameters
        if not (mine.values_json and its.values_json):
            return False
        same = (mine.optimizer, mine.group) == (its.optimizer, its.group)
        return same and bool(json.loads(mine.values_json).keys() & json.loads(its.values_json))
    return bool(overlap(ops, ops_of(index, other)))


def audit_detail(row: EditRow) -> dict[str, Any]:
    ops = [
        {key: _exact(value) for key, value in one.items() if key != "names"}
        for one in row.detail.get("ops", [])[:16]
    ]
    detail: dict[str, Any] = {"job": row.job, "id": row.id, "staged_by": row.actor}
    detail |= {"ops": ops, "note": row.note}
    detail |= {n: row.detail[n] for n in ("hyperparameters", "rollback") if row.detail.get(n)}
    detail |= {name: True for name in ("allow_nonfinite", "force") if row.detail.get(name)}
    return {**detail, "undo_of": row.undo_of} if row.undo_of else detail


def _outcome(row: EditRow) -> dict[str, Any]:
    found = {"step": row.step, "before": row.detail.get("before"), "after": row.detail.get("after")}
    return {**found, "reason": row.reason} if row.reason else found


def _exact(value: Any) -> Any:
    """The value, or the repr of NaN and infinities, which JSON does not have."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _why(error: Exception) -> str:
    if isinstance(error, ParamdError):
        return str(error)
    return "internal error; see the control plane's log"
