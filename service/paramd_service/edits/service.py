"""Edits and pauses as REST calls them: one EditService per incarnation, EditRegistry over all."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from paramd.errors import ConflictError, DeniedError, ExistsError, NotFoundError, ParamdError
from paramd.layout.edits.ops import EditState
from paramd.layout.edits.plan import PlannedOp
from paramd.layout.select import NameIndex
from paramd.mesh.edits.calls import PauseState
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import MAX_LEASE_S
from paramd_service.admission import while_permitted
from paramd_service.control.access.authority import Principal
from paramd_service.control.access.roles import Action, UserRole
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.mesh.watch import Publish
from paramd_service.control.records.events import Kind
from paramd_service.control.records.records import Records
from paramd_service.control.store.edits import EditRow
from paramd_service.edits.incarnation import IncarnationEdits, audit_detail
from paramd_service.edits.machine import CallOff, IncarnationEnded, no_data
from paramd_service.edits.marks import KeptState, Marks
from paramd_service.edits.pauses import Pause
from paramd_service.edits.runner import EditRun, preview_all, verify_staged
from paramd_service.edits.spec import (
    EditConfig,
    EditSpec,
    Pace,
    Planned,
    ops_of,
    plan_edit,
    plan_undo,
    plan_whole,
    same_data,
)

ABORT_WAIT_S = 5.0

log = logging.getLogger("paramd.control.edits")


@dataclass(frozen=True, eq=False)
class EditService:
    """The edits of one incarnation. Use on one event loop."""

    mesh: Incarnation
    work: IncarnationEdits
    records: Records
    config: EditConfig
    pace: Pace
    marks: Marks
    _creating: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def create(self, by: Principal, spec: EditSpec, edit_id: str | None) -> EditRow:
        """Create an edit. Idempotent: the same id and content return the existing row.

        Raises:
            UsageError, NotFoundError: The ops do not fit the layout, or the manifest is too
                large.
            ConflictError: The edit changes more of the model than max_share.
            DeniedError: Only an admin may write NaN and infinities.
            ExistsError: The id is taken by an edit with different content.
            ExhaustedError: Too many edits per minute.
        """
        self.mesh.check()
        if spec.allow_nonfinite and by.role is not UserRole.ADMIN:
            raise DeniedError("allow_nonfinite: only an admin may write NaN and infinities")
        index, digest = await self._layout()
        name = edit_id if edit_id is not None else secrets.token_hex(16)
        planned = await asyncio.to_thread(
            plan_edit, index, spec, edit_id=name, incarnation=self.mesh.number, layout_digest=digest
        )
        self._check_share(planned.share)
        detail = {
            "if_step": spec.if_step,
            "dry_run": spec.dry_run,
            "with_data": spec.with_data,
            "reset_moments": spec.reset_moments,
            "allow_nonfinite": spec.allow_nonfinite,
            "author": by.token_id or "",
        }
        return await self._begun(by, planned, index, spec.note, detail)

    def _check_share(self, share: float) -> None:
        if share > self.config.max_share:
            raise ConflictError(
                f"the edit changes {share:.1%} of the model; the limit of this control "
                f"plane is {self.config.max_share:.1%} ([edits] max_share)"
            )

    async def change(
        self,
        by: Principal,
        edit_id: str | None,
        *,
        optimizer: int,
        group: int,
        values: Mapping[str, float | list[float]],
        note: str,
    ) -> EditRow:
        """Create an edit that sets hyper-parameters. Idempotent, and raises, as `create`."""
        self.mesh.check()
        index, digest = await self._layout()
        text = json.dumps(dict(values), sort_keys=True, allow_nan=False)
        wanted = pb.HyperparameterChange(optimizer=optimizer, group=group, values_json=text)
        planned = plan_whole(index, self._manifest(edit_id, digest, hyperparameters=wanted))
        detail = {
            "hyperparameters": {"optimizer": optimizer, "group": group, "values": dict(values)}
        }
        return await self._begun(by, planned, index, note, detail)

    async def roll_back(
        self, by: Principal, edit_id: str | None, to: str | int, note: str
    ) -> EditRow:
        """Create an edit that returns training to a restore point or a step.

        Idempotent as `create`.

        Raises:
            NotFoundError: For an unknown state.
            ConflictError: If a rank lacks it.
        """
        self.mesh.check()
        index, digest = await self._layout()
        self._check_share(1.0)
        state = await self.marks.find(to)
        target = pb.Rollback(
            mark=state.name, step=state.step, lineage=state.lineage, edits=state.edits
        )
        manifest = self._manifest(edit_id, digest, rollback=target)
        planned = plan_whole(index, manifest, state.size_bytes)
        detail = {"rollback": {"mark": state.name, "step": state.step}}
        return await self._begun(by, planned, index, note, detail)

    def _manifest(self, edit_id: str | None, digest: str, **content: Any) -> pb.EditManifest:
        return pb.EditManifest(
            edit_id=edit_id if edit_id is not None else secrets.token_hex(16),
            incarnation=self.mesh.number,
            layout_digest=digest,
            undoable=True,
            **content,
        )

    async def _begun(
        self,
        by: Principal,
        planned: Planned,
        index: NameIndex,
        note: str,
        detail: Mapping[str, object],
        *,
        undo_of: str = "",
    ) -> EditRow:
        """Open an edit, and have it staged and committed unless it waits for data."""
        edit_id, with_data = planned.manifest.edit_id, bool(detail.get("with_data"))
        async with self._creating:
            known = self.work.open.get(edit_id)
            row = known.row if known is not None else await self.records.edits.find(edit_id)
            if row is not None:
                if row.digest != planned.digest.hex() or row.job != self.mesh.job:
                    raise ExistsError(f"edit {edit_id} exists with different content; use a new id")
                # The previous control plane may have stored the row and died before staging it.
                driver = self.work.open.get(edit_id)
            else:
                self.pace.take(time.monotonic())
                row = EditRow(
                    id=edit_id,
                    job=self.mesh.job,
                    incarnation=self.mesh.number,
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
                # The creation of an edit without data is recorded by its commit.
                creating = self.records.recorded(by, "edit.create", audit_detail(row), self.mesh)
                async with creating if with_data else nullcontext():
                    row = replace(row, number=await self.records.edits.add(row))
                check = no_data if undo_of else same_data(index, planned.ops)
                driver = self.work.drive(row, check)
                if self.mesh.over is not None:  # meanwhile: nobody else ends it
                    driver.feed(IncarnationEnded(f"run {self.mesh.number} ended"))
        if driver is not None and driver.is_idle and not with_data:
            _check_own(by, row)
            driver.start(self.work.stage_and_commit(driver, by, planned, index))
        return row

    async def undo(
        self,
        by: Principal,
        edit_id: str | None,
        done: EditRow,
        *,
        force: bool,
        dry_run: bool = False,
    ) -> EditRow:
        """Create an edit that undoes an applied one; with `dry_run`, only compute what it would
        change.

        Raises:
            DeniedError: It would restore NaN or infinities, and the caller is not an admin.
            ConflictError: `done` was not applied in this incarnation, is already undone, or a
                later edit changed some of the same elements and `force` is not set.
        """
        self.mesh.check()
        if reason := self.why_no_undo(done):
            raise ConflictError(f"edit {done.id} cannot be undone: {reason}")
        # `done` may itself be the undo of an edit that was allowed to write NaN.
        undone = await self.records.edits.find(done.undo_of) if done.undo_of else None
        nonfinite = undone is not None and bool(undone.detail.get("allow_nonfinite"))
        if nonfinite and by.role is not UserRole.ADMIN:
            raise DeniedError(
                f"edit {done.id} removed NaN or infinities; only an admin may restore them"
            )
        index, _ = await self._layout()
        manifest = pb.EditManifest.FromString(done.manifest)
        name = edit_id if edit_id is not None else secrets.token_hex(16)
        planned = plan_undo(index, manifest, done.detail.get("ops", []), edit_id=name)
        # Checked again in its turn: edits queued before this one are not applied yet.
        if not force and (other := await self.work.changed_since(index, done, planned.ops)):
            raise ConflictError(
                f"edit {other.id} by {other.actor} later changed some of the same elements; undo "
                "that one first, or pass force=true to discard its changes to them"
            )
        detail: dict[str, object] = {
            "force": force,
            "allow_nonfinite": nonfinite,
            "dry_run": dry_run,
        }
        detail |= {n: done.detail[n] for n in ("hyperparameters", "rollback") if n in done.detail}
        zeroed = bool(done.detail.get("reset_moments"))
        note = f"optimizer state that edit {done.id[:8]} zeroed stays zero" if zeroed else ""
        return await self._begun(by, planned, index, note, detail, undo_of=done.id)

    async def commit(self, by: Principal, row: EditRow) -> None:
        """Start the commit of a staged edit; return once it has started. Idempotent.

        Raises:
            DeniedError: Another token created it, and the role may not commit others' edits.
            ConflictError: Data is missing, or was uploaded with another token.
        """
        _check_own(by, row)
        driver = self.work.open.get(row.id)
        if driver is None or self.work.is_committing(row.id):
            return
        if driver.machine.state is EditState.COMMITTED:
            return
        index, ops = await self._verified(driver)
        await driver.until(EditState.STAGED, EditState.COMMITTED)
        driver.start(self.work.commit(driver, by, index, ops))

    def takes_data(self, row: EditRow) -> bool:
        """Whether data may still be uploaded for it: its commit has not begun."""
        staging = row.state in (EditState.STAGING, EditState.STAGED)
        return staging and not self.work.is_committing(row.id)

    async def preview(self, row: EditRow) -> EditRow:
        """Compute statistics before and after a staged edit without applying it."""
        driver = self.work.open.get(row.id)
        if driver is None:
            raise ConflictError(f"edit {row.id} is {row.state}; create a new one")
        index, ops = await self._verified(driver)
        view = self.mesh.coordinator.joined()
        driver.describe(**await preview_all(self.mesh.calls, view, row.id, index, ops))
        return driver.row

    async def _verified(self, driver: EditRun) -> tuple[NameIndex, tuple[PlannedOp, ...]]:
        """The layout and the ops of an edit that all ranks have. Raises as `verify_staged`."""
        index, _ = await self._layout()
        manifest = pb.EditManifest.FromString(driver.row.manifest)
        view, ops = self.mesh.coordinator.joined(), ops_of(index, manifest)
        # An edit taken up from an earlier control plane has no check of its data yet.
        driver.machine.same_data = no_data if driver.row.undo_of else same_data(index, ops)
        await verify_staged(driver, self.mesh.calls, view, manifest)
        return index, ops

    async def abort(self, by: Principal, row: EditRow) -> EditRow:
        """Abort the edit unless the trainers have agreed on it; the returned row has its state.

        Raises:
            DeniedError: When the role may not abort others' edits.
        """
        driver = self.work.open.get(row.id)
        if driver is None:
            return row
        _check_own(by, row)
        detail = {"id": row.id, "staged_by": row.actor}
        async with self.records.recorded(by, "edit.abort", detail, self.mesh) as entry:
            driver.feed(CallOff(f"aborted by {by.name}"))
            with suppress(TimeoutError):
                await asyncio.wait_for(driver.until(), ABORT_WAIT_S)
            entry.outcome(driver.row.state.lower())
        return driver.row

    async def undo_refusal(self, row: EditRow) -> str:
        """Why an applied edit can no longer be undone, asking a rank; empty if it can."""
        if reason := self.why_no_undo(row):
            return reason
        joined = self.mesh.registry.view().joined
        if joined:
            report = joined[0]
            with suppress(ParamdError):
                request = pb.GetEditRequest(edit_id=row.id)
                found = await self.mesh.calls.ask(report.rank, report.address, request)
                return str(found.progress.undo_refusal)
        return str(row.detail.get("undo_refusal", ""))

    def why_no_undo(self, row: EditRow) -> str:
        """Why the edit cannot be undone according to the store; empty if it can."""
        if row.state != EditState.APPLIED:
            return f"it is {row.state}"
        if row.undone_by:
            by = row.undone_by
            return f"it was undone by edit {by}; if that one was undone, undo the edit that did it"
        if row.incarnation != self.mesh.number or self.mesh.over is not None:
            return f"its run {row.incarnation} has ended"
        return ""

    async def _layout(self) -> tuple[NameIndex, str]:
        # joined() requires all ranks: an edit that a missing rank cannot take part in never starts.
        digest, index = await self.mesh.layouts.get(self.mesh.coordinator.joined())
        return index, digest


def _check_own(by: Principal, row: EditRow) -> None:
    """Raise DeniedError unless the caller created the edit or may act on others' edits."""
    if by.name != row.actor and not by.may(Action.EDIT_ANY):
        raise DeniedError(
            f"edit {row.id} was created by {row.actor}; only that token or an admin may commit or "
            "abort it"
        )


class EditRegistry:
    """All edits and pauses of a control plane. `Jobs` calls it on one event loop."""

    def __init__(
        self,
        records: Records,
        config: EditConfig,
        *,
        publish: Publish,
        applied: Callable[[EditRow], None] = lambda row: None,
    ) -> None:
        """`applied` is called with each edit that was applied."""
        self.config = config
        self._records = records
        self._publish = publish
        self._applied = applied
        self._services: dict[str, EditService] = {}
        self._paces: dict[str, Pace] = {}
        self._older: list[EditService] = []
        self.ended: Counter[tuple[str, str]] = Counter()
        """Edits that ended in this process, by (job, state)."""
        self.seconds: dict[str, float] = defaultdict(float)
        """Total seconds from creation to APPLIED, by job."""

    def began(self, mesh: Incarnation) -> None:
        """Start the edits and the pause of an incarnation; of one that is over, only show them."""
        job = mesh.job
        work = IncarnationEdits(
            mesh,
            self._records,
            self.config,
            on_change=self._edit_changed,
            on_pause=self._pause_changed,
        )
        pace = self._paces.setdefault(job, Pace(self.config.max_per_minute))
        marks = Marks(mesh, work.pause, self._records, on_change=self._mark_changed)
        service = EditService(mesh, work, self._records, self.config, pace, marks)
        if job in self._services:
            self._older.append(self._services[job])
        self._services[job] = service
        if mesh.over is None:
            work.begin()

    def evicted(self, job: str) -> None:
        """Let go of a job, once none of its edits is open."""
        self._paces.pop(job, None)
        if job in self._services:
            self._older.append(self._services.pop(job))

    def is_over(self, mesh: Incarnation) -> None:
        """Resolve the open edits of an incarnation that ended: ABORTED, or LOST if committed."""
        service = self._services.get(mesh.job)
        if service is not None and service.mesh is mesh:
            service.work.incarnation_ended(f"run {mesh.number} ended ({mesh.over})")

    def tick(self, mesh: Incarnation, _: MeshView, now_s: float | None = None) -> None:
        """Called once a second: time out staged edits, drop older incarnations with none open."""
        found = self._services.get(mesh.job)
        if found is not None and found.mesh is mesh:
            found.work.tick(now_s if now_s is not None else time.monotonic())
        self._older = [service for service in self._older if service.work.open]

    def service(self, job: str) -> EditService:
        """The edit service of the job's last incarnation. Raises NotFoundError."""
        found = self._services.get(job)
        if found is None:
            raise NotFoundError(f"job {job[:64]!r} is not served here")
        return found

    def pause(self, job: str) -> Pause:
        """The pause of the job's last incarnation. Raises NotFoundError."""
        return self.service(job).work.pause

    async def pause_for(self, job: str, name: str) -> None:
        """Pause training under this name; anyone allowed to pause may end it. Raises as `begin`."""
        by = Principal(name, UserRole.VIEWER)
        await self.pause(job).begin(by, MAX_LEASE_S, "", for_all=True)

    def pause_counts(self) -> dict[str, int]:
        """Pauses begun in the job's last incarnation, by job."""
        return {job: one.work.pause.begun_count for job, one in self._services.items()}

    def open_counts(self) -> Counter[tuple[str, str]]:
        return Counter(
            (job, driver.row.state)
            for job, service in self._services.items()
            for driver in service.work.open.values()
        )

    def _open(self, job: str) -> Mapping[str, EditRun]:
        found = self._services.get(job)
        return found.work.open if found is not None else {}

    async def get(self, job: str, edit_id: str) -> EditRow:
        """The current row of an edit, by the first characters of its id.

        Raises:
            NotFoundError, UsageError: When none, or several, begin like this.
        """
        edit_id = await self._records.edits.whole_id(job, edit_id)
        driver = self._open(job).get(edit_id)
        row = driver.row if driver is not None else await self._records.edits.find(edit_id)
        if row is None or row.job != job:
            raise NotFoundError(f"edit {edit_id} does not exist; see: paramd edits")
        return row

    async def wait(self, row: EditRow, wait_s: float) -> EditRow:
        """Wait up to `wait_s` seconds for the edit to end; return its row.

        Raises:
            DeniedError: When the caller's token or session ends meanwhile.
        """
        driver = self._open(row.job).get(row.id)
        if driver is not None and wait_s > 0:
            await while_permitted(driver.until(), wait_s)
        row = driver.row if driver is not None else await self.get(row.job, row.id)
        if row.ended_s is not None and row.detail.get("rollback"):
            # Report it once training has resumed: the caller may want to pause it next.
            await self.pause(row.job).over(min(ABORT_WAIT_S, wait_s))
        return row

    async def page(
        self, job: str, *, limit: int, before: int | None, state: str | None
    ) -> list[EditRow]:
        """The newest edits of a job, newest first."""
        rows = await self._records.edits.page(job, limit=limit, before=before, state=state)
        live = self._open(job)
        return [live[row.id].row if row.id in live else row for row in rows]

    async def close(self) -> None:
        """Stop driving open edits; the next control plane resolves them."""
        for service in [*self._older, *self._services.values()]:
            await service.work.close()

    def _edit_changed(self, row: EditRow) -> None:
        if row.ended_s is not None:
            self.ended[row.job, row.state] += 1
            if row.state == EditState.APPLIED:
                self.seconds[row.job] += row.ended_s - row.created_s
                self._applied(row)
        log.info("job %s: edit %s is %s %s", row.job, row.id, row.state, row.reason)
        data = {
            "id": row.id,
            "incarnation": row.incarnation,
            "state": row.state,
            "step": row.step,
            "actor": row.actor,
            "undo_of": row.undo_of,
            "reason": row.reason[:1000],
            "rollback": row.detail.get("rollback"),
        }
        self._publish(Kind.EDIT, data, job=row.job)

    def _mark_changed(self, job: str, name: str, mark: KeptState | None) -> None:
        done = "made" if mark is not None else "deleted"
        log.info("job %s: restore point %r is %s", job, name, done)
        step = mark.step if mark is not None else -1
        self._publish(Kind.MARK, {"mark": name, "at_step": step, "kept": mark is not None}, job=job)

    def _pause_changed(self, job: str, view: PauseState) -> None:
        log.info("job %s is %s%s", job, view.state, f", by {view.holder}" if view.holder else "")
        data = {
            "state": view.state.value,
            "holder": view.holder,
            "step": view.step,
            "steps_left": view.steps_left,
        }
        self._publish(Kind.PAUSE, data, job=job)
