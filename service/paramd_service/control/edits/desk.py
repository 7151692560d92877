"""What REST asks for about the edits of one epoch: create, commit, preview, undo, call off."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from paramd.errors import ConflictError, DeniedError, ExistsError, ParamdError
from paramd.layout.edits import overlap
from paramd.layout.select import NameIndex
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.edits.driver import EditDriver
from paramd_service.control.edits.limits import EditConfig, Pace
from paramd_service.control.edits.machine import EditState, no_data
from paramd_service.control.edits.planning import (
    Planned,
    Wish,
    ops_of,
    plan_undo,
    plan_wish,
    same_data,
)
from paramd_service.control.edits.staging import look_all, preview_all
from paramd_service.control.edits.words import CallOff
from paramd_service.control.edits.work import EditWork
from paramd_service.control.incarnation import Incarnation
from paramd_service.control.store.edits import EditRow, EditStore
from paramd_service.control.tokens.authority import Principal
from paramd_service.control.tokens.roles import UserRole

ABORT_WAIT_S = 5.0


class EditDesk:
    """Use on one event loop."""

    def __init__(
        self,
        incarnation: Incarnation,
        work: EditWork,
        store: EditStore,
        config: EditConfig,
        pace: Pace,
    ) -> None:
        self._mesh = incarnation
        self._store = store
        self._config = config
        self._pace = pace
        self._creating = asyncio.Lock()
        self.work = work

    async def create(self, by: Principal, wish: Wish, edit_id: str | None) -> EditRow:
        """A new edit; the same id with the same content is the same edit.

        Raises:
            UsageError, NotFoundError: it does not fit the layout, or is beyond a limit.
            DeniedError: only an admin may have NaN and infinities.
            ExistsError: the id has another content.
            ExhaustedError: too many edits a minute.
        """
        self._mesh.check()
        if wish.allow_nonfinite and by.role is not UserRole.ADMIN:
            raise DeniedError("allow_nonfinite: only an admin may write NaN and infinities")
        index, digest = await self._layout()
        name = edit_id if edit_id is not None else secrets.token_hex(16)
        planned = await asyncio.to_thread(
            plan_wish, index, wish, edit_id=name, epoch=self._mesh.epoch, layout_digest=digest
        )
        if planned.share > self._config.max_share:
            raise ConflictError(
                f"the edit changes {planned.share:.1%} of the model; the limit of this control "
                f"plane is {self._config.max_share:.1%} ([edits] max_share)"
            )
        detail = {
            "if_step": wish.if_step,
            "dry_run": wish.dry_run,
            "with_data": wish.with_data,
            "reset_moments": wish.reset_moments,
            "allow_nonfinite": wish.allow_nonfinite,
        }
        row, driver = await self._opened(by, planned, index, wish.note, detail)
        if driver is None:
            # A control plane before us may have got no further than to write it down.
            waiting = self.work.open.get(name)
            driver = waiting if waiting is not None and waiting.is_idle else None
        if driver is not None and not wish.with_data:
            work = self.work.stage_and_commit(driver, planned, index, dry_run=wish.dry_run)
            driver.start(work)
        return row

    async def undo(self, by: Principal, done: EditRow, *, force: bool, edit_id: str) -> EditRow:
        """An edit that undoes an applied one.

        Raises:
            ConflictError: it was not applied in this epoch, was undone before, or a later edit
                changed some of the same elements and not `force`.
        """
        self._mesh.check()
        if reason := self.why_no_undo(done):
            raise ConflictError(f"edit {done.id} cannot be undone: {reason}")
        index, _ = await self._layout()
        manifest = pb.EditManifest.FromString(done.manifest)
        planned = plan_undo(index, manifest, done.detail.get("ops", []), edit_id=edit_id)
        if not force and (other := await self._overlapping(index, done, planned)):
            raise ConflictError(
                f"edit {other.id} of {other.actor} changed some of the same elements later; undo "
                "that one first, or give force=true to lose what it did to them"
            )
        row, driver = await self._opened(by, planned, index, "", {}, undo_of=done.id)
        if driver is not None:
            driver.start(self.work.stage_and_commit(driver, planned, index, dry_run=False))
        return row

    async def commit(self, row: EditRow) -> None:
        """Has a staged edit applied; returns when that has begun. Idempotent.

        Raises:
            ConflictError: data is missing, or it is not under way any more.
        """
        driver = self.work.open.get(row.id)
        if driver is None or self.work.is_committing(row.id):
            return
        if driver.machine.state is EditState.COMMITTED:
            return
        index, _ = await self._layout()
        manifest = pb.EditManifest.FromString(row.manifest)
        view = self._mesh.coordinator.joined()
        await look_all(driver, self.work.calls, view, manifest)
        await driver.until(EditState.STAGED, EditState.COMMITTED)
        driver.start(self.work.commit(driver, index, ops_of(index, manifest)))

    async def preview(self, row: EditRow) -> EditRow:
        """Statistics before and after a staged edit, which stays as it is."""
        driver = self._driver_of(row)
        index, _ = await self._layout()
        view = self._mesh.coordinator.joined()
        manifest = pb.EditManifest.FromString(row.manifest)
        await look_all(driver, self.work.calls, view, manifest)
        ops = ops_of(index, manifest)
        driver.describe(**await preview_all(self.work.calls, view, row.id, index, ops))
        return driver.row

    async def abort(self, row: EditRow, reason: str) -> EditRow:
        """Calls it off, unless the trainers may have agreed on it; the answer's state tells."""
        driver = self.work.open.get(row.id)
        if driver is None:
            return row
        driver.feed(CallOff(reason))
        with suppress(TimeoutError):
            await asyncio.wait_for(driver.until(), ABORT_WAIT_S)
        return driver.row

    async def undo_refusal(self, row: EditRow) -> str:
        """Why the ranks cannot undo an applied edit any more; empty when they can."""
        if reason := self.why_no_undo(row):
            return reason
        for report in self._mesh.registry.view().joined[:1]:
            with suppress(ParamdError):
                found = await self.work.calls.get(report.rank, report.peer.address, row.id)
                return found.progress.undo_refusal
        return str(row.detail.get("undo_refusal", ""))

    def why_no_undo(self, row: EditRow) -> str:
        """Why it cannot be undone, as far as the store knows."""
        if row.state != EditState.APPLIED:
            return f"it is {row.state}"
        if row.undone_by:
            return f"edit {row.undone_by} has undone it"
        if row.epoch != self._mesh.epoch or self._mesh.over is not None:
            return f"its epoch {row.epoch} is over"
        return ""

    async def _overlapping(self, index: NameIndex, done: EditRow, undo: Planned) -> EditRow | None:
        """The newest edit since that changed a common element and has not been undone."""
        since = await self._store.of_job(done.job, (EditState.APPLIED,), epoch=done.epoch)
        later = [row for row in since if row.edits > done.edits]
        numbers = {row.id: row.edits for row in later}
        for row in sorted(later, key=lambda row: -row.edits):
            undone = row.undone_by in numbers or row.undo_of in numbers
            if not undone and overlap(
                undo.ops, ops_of(index, pb.EditManifest.FromString(row.manifest))
            ):
                return row
        return None

    async def _opened(
        self,
        by: Principal,
        planned: Planned,
        index: NameIndex,
        note: str,
        detail: Mapping[str, object],
        *,
        undo_of: str = "",
    ) -> tuple[EditRow, EditDriver | None]:
        """A new edit under way, or the row of the same one, that was created before."""
        edit_id = planned.manifest.edit_id
        async with self._creating:
            known = self.work.open.get(edit_id)
            row = known.row if known is not None else await self._store.find(edit_id)
            if row is not None:
                if row.digest != planned.digest.hex() or row.job != self._mesh.job:
                    raise ExistsError(f"edit {edit_id} has another content; take a new id")
                return row, None
            self._pace.take(time.monotonic())
            row = EditRow(
                id=edit_id,
                job=self._mesh.job,
                epoch=self._mesh.epoch,
                state=EditState.STAGING,
                actor=by.name,
                role=by.role.value,
                note=note,
                created_s=time.time(),
                size_bytes=planned.size_bytes,
                manifest=planned.manifest.SerializeToString(deterministic=True),
                digest=planned.digest.hex(),
                detail={"ops": planned.documents, **detail},
                undo_of=undo_of,
            )
            row = replace(row, number=await self._store.add(row))
            check = no_data if undo_of else same_data(index, planned.ops)
            return row, self.work.drive(row, check)

    async def _layout(self) -> tuple[NameIndex, str]:
        # All ranks: nothing is begun that the ranks which are missing could not take part in.
        digest, index = await self._mesh.layouts.get(self._mesh.coordinator.joined())
        return index, digest

    def _driver_of(self, row: EditRow) -> EditDriver:
        driver = self.work.open.get(row.id)
        if driver is None:
            raise ConflictError(f"edit {row.id} is {row.state}; create a new one")
        return driver
