"""Exports: checkpoints of a running job, written to destinations that the operator allows."""

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from paramd.documents import Document
from paramd.errors import ParamdError
from paramd.layout.edits.ops import OpSpec
from paramd.mesh.edits.calls import Edit
from paramd.mesh.exports.calls import ExportInfo, loaded_names
from paramd_service.control.access.doorway import principal_of
from paramd_service.control.access.roles import Action
from paramd_service.control.api.routes.jobs import job_document
from paramd_service.control.api.routes.paging import PageToken, begin_of, make_token
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.parts import ControlHost
from paramd_service.destinations.destinations import parse_destinations
from paramd_service.exports.documents import (
    AssetDocument,
    AssetRequest,
    DestinationDocument,
    DestinationList,
    DestinationRequest,
    ExportList,
    ExportRequest,
    LoadRequest,
    ScheduleDocument,
    ScheduleList,
    ScheduleRequest,
    schedule_document,
)
from paramd_service.exports.loading import Loading
from paramd_service.exports.schedules import Cadence
from paramd_service.exports.service import ExportService

MAX_LIMIT = 200

ShortId = Annotated[
    str, Path(min_length=1, max_length=32, description="Its id, or its first characters")
]
Wanted = Annotated[
    Literal["", "PLANNED", "RUNNING", "VERIFYING", "DONE", "FAILED", "CANCELLED"],
    Query(description="Only exports in this state; empty: all"),
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Exports on a page")]
Where = Annotated[
    str, Query(min_length=3, max_length=1100, description='Name of a destination, "/", key')
]
FileName = Annotated[
    str, Query(min_length=1, max_length=255, description="The manifest, or a file it lists")
]
Offset = Annotated[int, Query(ge=0, le=1 << 50, description="First byte wanted")]

_PAGE = "exports"
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}
_CADENCE = {"every_steps", "keep_last", "keep_every"}


def router(host: ControlHost, exports: ExportService) -> APIRouter:
    routes = APIRouter(tags=["exports"])
    _exports(host, exports, routes)
    _schedules(host, exports, routes)
    _loading(host, exports, routes)

    @routes.get("/jobs/{job}/export-file", response_class=Response, responses=_BYTES)
    async def read_export_file(
        job: str, destination: Where, name: FileName, request: Request, offset_bytes: Offset = 0
    ) -> Response:
        """Up to 8 MiB of a file of a finished export; header paramd-file-bytes has its size."""
        mesh, jobs = host.jobs.get(job), principal_of(request).jobs
        size_bytes, data = await exports.read_file(mesh, destination, name, offset_bytes, jobs)
        headers = {"paramd-file-bytes": str(size_bytes)}
        return Response(data, media_type="application/octet-stream", headers=headers)

    @routes.get("/destinations")
    async def list_destinations(request: Request) -> DestinationList:
        """Names and kinds of the destinations; for admins their paths or URLs, too."""
        shows = principal_of(request).may(Action.ADMINISTER)
        found = sorted(exports.destinations.values(), key=lambda one: one.name)
        return DestinationList(
            destinations=[
                DestinationDocument(
                    name=one.name, kind=one.kind.value, root=one.root if shows else ""
                )
                for one in found
            ]
        )

    @routes.post("/destinations", status_code=201)
    async def add_destination(wanted: DestinationRequest, request: Request) -> DestinationList:
        """Add a destination, whose root then stays; all of them. Idempotent."""
        detail = wanted.model_dump()
        # Before the audit keeps it for good: what is refused may hold a secret.
        (one,) = parse_destinations({wanted.name: wanted.root}).values()
        async with host.records.recorded(principal_of(request), "destination.add", detail):
            await exports.add_destination(one)
        return await list_destinations(request)

    return routes


def _exports(host: ControlHost, exports: ExportService, routes: APIRouter) -> None:
    @routes.post("/jobs/{job}/exports", status_code=202)
    async def create_export(job: str, wanted: ExportRequest, request: Request) -> ExportInfo:
        """Start an export of one step; poll get_export for progress. Idempotent with an id."""
        mesh, by = host.jobs.get(job), principal_of(request)
        asked = wanted.model_dump(exclude={"id"})
        async with _recorded(host, mesh, request, "export.create", asked) as entry:
            found = await exports.create(
                mesh, asked, actor=by.name, jobs=by.jobs, export_id=wanted.id
            )
            entry.outcome(id=found.id)
            return found

    @routes.get("/jobs/{job}/exports")
    async def list_exports(
        job: str, state: Wanted = "", limit: Limit = 50, page_token: PageToken = ""
    ) -> ExportList:
        """Exports of the job, newest first, without their files."""
        host.jobs.get(job)
        offset = begin_of(page_token, _PAGE) or 0
        found = await exports.page(job, limit=limit + 1, offset=offset, state=state)
        more = len(found) > limit
        return ExportList(
            exports=found[:limit], next_page_token=make_token(offset + limit, _PAGE) if more else ""
        )

    @routes.get("/jobs/{job}/exports/{export}")
    async def get_export(job: str, export: ShortId) -> ExportInfo:
        """One export and its files."""
        host.jobs.get(job)
        export = await exports.store.whole_id(job, export)
        return await exports.get(job, export)

    @routes.delete("/jobs/{job}/exports/{export}")
    async def cancel_export(job: str, export: ShortId, request: Request) -> ExportInfo:
        """Cancel an export and remove what it wrote. Idempotent; refused once it has finished."""
        mesh = host.jobs.get(job)
        export = await exports.store.whole_id(job, export)
        async with _recorded(host, mesh, request, "export.cancel", {"id": export}):
            actor = principal_of(request).name
            return await exports.cancel(job, export, actor=actor)

    @routes.post("/jobs/{job}/export-assets")
    async def store_export_asset(job: str, part: AssetRequest, request: Request) -> AssetDocument:
        """Upload a part of a small file to be stored next to an export. Idempotent."""
        mesh = host.jobs.get(job)
        detail = {"owner": part.owner, "name": part.name, "offset_bytes": part.offset_bytes}
        async with _recorded(host, mesh, request, "export-asset.store", detail) as entry:
            size_bytes = await asyncio.to_thread(
                exports.assets.put,
                job,
                part.owner,
                part.name,
                part.offset_bytes,
                part.data,
            )
            entry.outcome(size_bytes=size_bytes)
            return AssetDocument(name=part.name, size_bytes=size_bytes)


def _schedules(host: ControlHost, exports: ExportService, routes: APIRouter) -> None:
    @routes.get("/jobs/{job}/export-schedules")
    async def list_schedules(job: str) -> ScheduleList:
        """Schedules in force, oldest first."""
        host.jobs.get(job)
        rows = await exports.schedules(job).all()
        return ScheduleList(schedules=[schedule_document(row) for row in rows])

    @routes.post("/jobs/{job}/export-schedules", status_code=201)
    async def create_schedule(
        job: str, wanted: ScheduleRequest, request: Request
    ) -> ScheduleDocument:
        """Create a schedule that starts exports. Idempotent with an id."""
        mesh, by = host.jobs.get(job), principal_of(request)
        detail = wanted.model_dump(exclude={"id"})
        cadence = Cadence(**wanted.model_dump(include=_CADENCE))
        asked = wanted.model_dump(exclude={"id", *_CADENCE})
        async with _recorded(host, mesh, request, "export-schedule.create", detail) as entry:
            row = await exports.add_schedule(
                mesh, asked, cadence, actor=by.name, jobs=by.jobs, schedule_id=wanted.id
            )
            entry.outcome(id=row.id)
            return schedule_document(row)

    @routes.delete("/jobs/{job}/export-schedules/{schedule}")
    async def delete_schedule(job: str, schedule: ShortId, request: Request) -> ScheduleDocument:
        """Delete a schedule. Its exports stay, and a running one continues."""
        mesh = host.jobs.get(job)
        detail = {"id": schedule}
        async with _recorded(host, mesh, request, "export-schedule.delete", detail):
            return schedule_document(await exports.schedules(job).delete(schedule))


def _recorded(
    host: ControlHost, mesh: Incarnation, request: Request, method: str, detail: dict[str, Any]
) -> Any:
    return host.records.recorded(principal_of(request), method, detail, mesh)


def _loading(host: ControlHost, exports: ExportService, routes: APIRouter) -> None:
    loading = Loading()

    @routes.post("/jobs/{job}/exports/{export}/load", response_model=Edit)
    async def load_export(
        job: str, export: ShortId, wanted: LoadRequest, request: Request
    ) -> Document:
        """Load the parameters of a finished safetensors export back into the running training, as
        one edit: on all ranks at one step, or on none. Buffers stay as they are, and so does the
        optimizer's state without `reset_moments`. The control plane's host reads the files.
        Idempotent by id."""
        mesh, who = host.jobs.get(job), principal_of(request)
        path, destination, export_id = await exports.directory(job, export)
        source = await exports.get(job, export_id)
        _, index = await mesh.layouts.get(mesh.registry.view())
        terms = wanted.model_dump(include={"reset_moments", "note"})
        terms["note"] = wanted.note or f"loaded {destination}, step {source.step}"
        ops = [OpSpec(pattern=name, op="set", data=True) for name in loaded_names(index.layout)]
        with loading.place(wanted.id):
            edit = await host.parts.edit_of_data(mesh, who, ops, wanted.id, terms)
            # A repeated request waits for what the first has begun.
            if edit.takes_data:
                document = await job_document(host, mesh, who)
                try:
                    await loading.upload(
                        job=job,
                        document=document.model_dump(mode="json"),
                        path=path,
                        label=f"export {destination}",
                        export_id=export_id,
                        edit={"id": edit.id, **terms},
                    )
                    if wanted.preview:
                        return await edit.preview()
                    await edit.commit()
                except BaseException:
                    # Free the staged operands now rather than when the edit expires.
                    with suppress(ParamdError):
                        await edit.abort()
                    raise
        return await edit.ended(wanted.wait_s)
