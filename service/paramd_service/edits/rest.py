"""Edits: create, commit, preview, undo, abort, list."""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from paramd.documents import read_document
from paramd.layout.edits.ops import EditState, OpSpec
from paramd.mesh.edits.calls import Edit, EditOp, Undo
from paramd_service.control.access.doorway import may_read, principal_of
from paramd_service.control.api.models import WaitRequest
from paramd_service.control.api.routes.paging import begin_of, make_token
from paramd_service.control.api.routes.params import PageToken
from paramd_service.control.mesh.jobs import Jobs
from paramd_service.control.store.edits import EditRow
from paramd_service.edits.documents import EditList, EditRequest, EditStateName, UndoRequest
from paramd_service.edits.service import EditRegistry
from paramd_service.edits.spec import EditSpec

_PAGE = "edits"
_NS_A_MS = 1e6

EditId = Annotated[
    str,
    Path(alias="edit", min_length=1, max_length=32, description="Its id, or its first characters"),
]
Wait = Annotated[
    float, Query(ge=0, le=300, allow_inf_nan=False, description="Seconds to wait for it to end")
]
Limit = Annotated[int, Query(ge=1, le=1000, description="Edits on a page")]


def router(jobs: Jobs, edits: EditRegistry) -> APIRouter:
    routes = APIRouter(tags=["edits"])
    _add_making(routes, jobs, edits)
    _add_reading(routes, jobs, edits)
    return routes


def _add_making(routes: APIRouter, jobs: Jobs, edits: EditRegistry) -> None:
    async def row_of(job: str, edit: str) -> EditRow:
        jobs.get(job)
        return await edits.get(job, edit)

    @routes.post("/jobs/{job}/edits", status_code=201)
    async def create_edit(job: str, wanted: EditRequest, request: Request) -> Edit:
        """Create an edit. Without data it is applied at once; with data it waits for the upload
        and for commit_edit. Idempotent by id."""
        jobs.get(job)
        terms = wanted.model_dump(exclude={"ops", "id", "wait_s"})
        spec = EditSpec(ops=tuple(OpSpec(**op.model_dump()) for op in wanted.ops), **terms)
        row = await edits.service(job).create(principal_of(request), spec, wanted.id)
        wait_s = wanted.wait_s if not spec.with_data else 0.0
        return stored_document(edits, await edits.wait(row, wait_s))

    @routes.post("/jobs/{job}/edits/{edit}/commit")
    async def commit_edit(job: str, edit: EditId, wanted: WaitRequest, request: Request) -> Edit:
        """Apply an edit whose data has been uploaded. Needs its author's token, or an admin's.
        Idempotent."""
        row = await row_of(job, edit)
        await edits.service(job).commit(principal_of(request), row)
        return stored_document(edits, await edits.wait(row, wanted.wait_s))

    @routes.post("/jobs/{job}/edits/{edit}/preview")
    async def preview_edit(job: str, edit: EditId) -> Edit:
        """Compute the statistics before and after a staged edit, without applying it."""
        row = await row_of(job, edit)
        return stored_document(edits, await edits.service(job).preview(row))

    @routes.post("/jobs/{job}/edits/{edit}/undo", status_code=201)
    async def undo_edit(job: str, edit: EditId, wanted: UndoRequest, request: Request) -> Edit:
        """Create an edit that undoes an applied one. Optimizer state that was zeroed stays zero;
        the note says so. Idempotent by id."""
        row, service = await row_of(job, edit), edits.service(job)
        made = await service.undo(
            principal_of(request), wanted.id, row, force=wanted.force, dry_run=wanted.dry_run
        )
        return stored_document(edits, await edits.wait(made, wanted.wait_s))

    @routes.delete("/jobs/{job}/edits/{edit}")
    async def abort_edit(job: str, edit: EditId, request: Request) -> Edit:
        """Abort an edit, unless the trainers may have agreed on it: check the state returned.
        Needs its author's token, or an admin's. Idempotent."""
        row = await row_of(job, edit)
        return stored_document(edits, await edits.service(job).abort(principal_of(request), row))


def _add_reading(routes: APIRouter, jobs: Jobs, edits: EditRegistry) -> None:
    @routes.get("/jobs/{job}/edits")
    async def list_edits(
        job: str,
        request: Request,
        state: Annotated[EditStateName | None, Query(description="Only in this state")] = None,
        limit: Limit = 100,
        page_token: PageToken = "",
    ) -> EditList:
        """Edits of the job in all its runs, newest first."""
        jobs.get(job)
        before = begin_of(page_token, _PAGE)
        rows = await edits.page(job, limit=limit, before=before, state=state)
        return EditList(
            edits=[_visible(stored_document(edits, row), request) for row in rows],
            next_page_token=make_token(rows[-1].number, _PAGE) if len(rows) == limit else "",
        )

    @routes.get("/jobs/{job}/edits/{edit}")
    async def get_edit(job: str, edit: EditId, request: Request, wait_s: Wait = 0.0) -> Edit:
        """An edit, once it has ended or after `wait_s`. If applied, the sidecars are asked
        whether it can still be undone."""
        jobs.get(job)
        row = await edits.wait(await edits.get(job, edit), wait_s)
        if row.state != EditState.APPLIED:
            return _visible(stored_document(edits, row), request)
        return _visible(document_of(row, await edits.service(job).undo_refusal(row)), request)


def _visible(document: Edit, request: Request) -> Edit:
    """Hide statistics and operands from viewers: an edit may name a single element."""
    if may_read(request):
        return document
    ops = (replace(op, value=None, weight=None, min=None, max=None) for op in document.ops)
    return replace(document, before=None, after=None, ops=tuple(ops))


def stored_document(edits: EditRegistry, row: EditRow) -> Edit:
    """The edit's document from the store alone, without asking the sidecars about undo."""
    refusal = f"it is {row.state}"
    if row.state == EditState.APPLIED:
        refusal = edits.service(row.job).why_no_undo(row) or str(row.detail.get("undo_refusal", ""))
    return document_of(row, refusal)


_IN_DETAIL = ("committed_by", "hyperparameters", "rollback", "before", "after")
"""Members that equal those of the row's `detail`."""


def document_of(row: EditRow, undo_refusal: str) -> Edit:
    applied = row.state == EditState.APPLIED
    return read_document(
        Edit,
        {name: row.detail.get(name) or None for name in _IN_DETAIL},
        id=row.id,
        job=row.job,
        incarnation=row.incarnation,
        reason=row.reason,
        actor=row.actor,
        note=row.note,
        created_s=row.created_s,
        ended_s=row.ended_s,
        step=row.step,
        boundary=row.boundary,
        size_bytes=row.size_bytes,
        undo_of=row.undo_of,
        undone_by=row.undone_by,
        state=EditState(row.state),
        dry_run=bool(row.detail.get("dry_run", False)),
        ops=tuple(read_document(EditOp, op) for op in row.detail.get("ops", [])),
        stop_ms=row.stop_ns / _NS_A_MS if applied else None,
        undo=Undo(possible=not undo_refusal, reason=undo_refusal),
        warning=str(row.detail.get("warning", "")),
    )
