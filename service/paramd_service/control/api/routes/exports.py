"""Exports: checkpoints of a running job, written to destinations that the operator allows."""

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from paramd.errors import ParamdError
from paramd.layout.edits.ops import OpSpec
from paramd.mesh.edits.calls import Edit
from paramd.mesh.exports.calls import ExportInfo, loaded_names
from paramd_service.control.access.doorway import principal_of
from paramd_service.control.access.roles import Action
from paramd_service.control.api.models import LoadRequest
from paramd_service.control.api.routes.edits import stored_document
from paramd_service.control.api.routes.jobs import job_document
from paramd_service.control.api.routes.paging import PageToken, begin_of, make_token
from paramd_service.control.api.services import Services
from paramd_service.control.edits.spec import EditSpec
from paramd_service.control.exports.documents import (
    AssetDocument,
    AssetRequest,
    DestinationDocument,
    DestinationList,
    DestinationRequest,
    ExportList,
    ExportRequest,
    ScheduleDocument,
    ScheduleList,
    ScheduleRequest,
    schedule_document,
)
from paramd_service.control.exports.loading import Loading
from paramd_service.control.exports.schedules import Cadence
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.destinations.destinations import parse_destinations

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


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["exports"])
    _exports(services, routes)
    _schedules(services, routes)
    _loading(services, routes)

    @routes.get("/jobs/{job}/export-file", response_class=Response, responses=_BYTES)
    async def read_export_file(
        job: str, destination: Where, name: FileName, request: Request, offset_bytes: Offset = 0
    ) -> Response:
        """Up to 8 MiB of a file of a finished export; header paramd-file-bytes has its size."""
        mesh, jobs = services.jobs.get(job), principal_of(request).jobs
        size_bytes, data = await services.exports.read_file(
            mesh, destination, name, offset_bytes, jobs
        )
        headers = {"paramd-file-bytes": str(size_bytes)}
        return Response(data, media_type="application/octet-stream", headers=headers)

    @routes.get("/destinations")
    async def list_destinations(request: Request) -> DestinationList:
        """Names and kinds of the destinations; for admins their paths or URLs, too."""
        shows = principal_of(request).may(Action.ADMINISTER)
        found = sorted(services.exports.destinations.values(), key=lambda one: one.name)
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
        async with services.records.recorded(principal_of(request), "destination.add", detail):
            await services.exports.add_destination(one)
        return await list_destinations(request)

    return routes


def _exports(services: Services, routes: APIRouter) -> None:
    @routes.post("/jobs/{job}/exports", status_code=202)
    async def create_export(job: str, wanted: ExportRequest, request: Request) -> ExportInfo:
        """Start an export of one step; poll get_export for progress. Idempotent with an id."""
        mesh, by = services.jobs.get(job), principal_of(request)
        asked = wanted.model_dump(exclude={"id"})
        async with _recorded(services, mesh, request, "export.create", asked) as entry:
            found = await services.exports.create(
                mesh, asked, actor=by.name, jobs=by.jobs, export_id=wanted.id
            )
            entry.outcome(id=found.id)
            return found

    @routes.get("/jobs/{job}/exports")
    async def list_exports(
        job: str, state: Wanted = "", limit: Limit = 50, page_token: PageToken = ""
    ) -> ExportList:
        """Exports of the job, newest first, without their files."""
        services.jobs.get(job)
        offset = begin_of(page_token, _PAGE) or 0
        found = await services.exports.page(job, limit=limit + 1, offset=offset, state=state)
        more = len(found) > limit
        return ExportList(
            exports=found[:limit], next_page_token=make_token(offset + limit, _PAGE) if more else ""
        )

    @routes.get("/jobs/{job}/exports/{export}")
    async def get_export(job: str, export: ShortId) -> ExportInfo:
        """One export and its files."""
        services.jobs.get(job)
        export = await services.exports.store.whole_id(job, export)
        return await services.exports.get(job, export)

    @routes.delete("/jobs/{job}/exports/{export}")
    async def cancel_export(job: str, export: ShortId, request: Request) -> ExportInfo:
        """Cancel an export and remove what it wrote. Idempotent; refused once it has finished."""
        mesh = services.jobs.get(job)
        export = await services.exports.store.whole_id(job, export)
        async with _recorded(services, mesh, request, "export.cancel", {"id": export}):
            actor = principal_of(request).name
            return await services.exports.cancel(job, export, actor=actor)

    @routes.post("/jobs/{job}/export-assets")
    async def store_export_asset(job: str, part: AssetRequest, request: Request) -> AssetDocument:
        """Upload a part of a small file to be stored next to an export. Idempotent."""
        mesh = services.jobs.get(job)
        detail = {"owner": part.owner, "name": part.name, "offset_bytes": part.offset_bytes}
        async with _recorded(services, mesh, request, "export-asset.store", detail) as entry:
            size_bytes = await asyncio.to_thread(
                services.exports.assets.put,
                job,
                part.owner,
                part.name,
                part.offset_bytes,
                part.data,
            )
            entry.outcome(size_bytes=size_bytes)
            return AssetDocument(name=part.name, size_bytes=size_bytes)


def _schedules(services: Services, routes: APIRouter) -> None:
    @routes.get("/jobs/{job}/export-schedules")
    async def list_schedules(job: str) -> ScheduleList:
        """Schedules in force, oldest first."""
        services.jobs.get(job)
        rows = await services.exports.schedules(job).all()
        return ScheduleList(schedules=[schedule_document(row) for row in rows])

    @routes.post("/jobs/{job}/export-schedules", status_code=201)
    async def create_schedule(
        job: str, wanted: ScheduleRequest, request: Request
    ) -> ScheduleDocument:
        """Create a schedule that starts exports. Idempotent with an id."""
        mesh, by = services.jobs.get(job), principal_of(request)
        detail = wanted.model_dump(exclude={"id"})
        cadence = Cadence(**wanted.model_dump(include=_CADENCE))
        asked = wanted.model_dump(exclude={"id", *_CADENCE})
        async with _recorded(services, mesh, request, "export-schedule.create", detail) as entry:
            row = await services.exports.add_schedule(
                mesh, asked, cadence, actor=by.name, jobs=by.jobs, schedule_id=wanted.id
            )
            entry.outcome(id=row.id)
            return schedule_document(row)

    @routes.delete("/jobs/{job}/export-schedules/{schedule}")
    async def delete_schedule(job: str, schedule: ShortId, request: Request) -> ScheduleDocument:
        """Delete a schedule. Its exports stay, and a running one continues."""
        mesh = services.jobs.get(job)
        detail = {"id": schedule}
        async with _recorded(services, mesh, request, "export-schedule.delete", detail):
            return schedule_document(await services.exports.schedules(job).delete(schedule))


def _recorded(
    services: Services, mesh: Incarnation, request: Request, method: str, detail: dict[str, Any]
) -> Any:
    return services.records.recorded(principal_of(request), method, detail, mesh)


def _loading(services: Services, routes: APIRouter) -> None:
    edits, loading = services.edits, Loading()

    @routes.post("/jobs/{job}/exports/{export}/load")
    async def load_export(job: str, export: ShortId, wanted: LoadRequest, request: Request) -> Edit:
        """Load the parameters of a finished safetensors export back into the running training, as
        one edit: on all ranks at one step, or on none. Buffers stay as they are, and so does the
        optimizer's state without `reset_moments`. The control plane's host reads the files.
        Idempotent by id."""
        mesh, who = services.jobs.get(job), principal_of(request)
        path, destination, export_id = await services.exports.directory(job, export)
        source = await services.exports.get(job, export_id)
        _, index = await mesh.layouts.get(mesh.registry.view())
        terms = wanted.model_dump(include={"reset_moments", "note"})
        terms["note"] = wanted.note or f"loaded {destination}, step {source.step}"
        ops = tuple(
            OpSpec(pattern=name, op="set", data=True) for name in loaded_names(index.layout)
        )
        service = edits.service(job)
        with loading.place(wanted.id):
            row = await service.create(who, EditSpec(ops=ops, **terms), wanted.id)
            # A repeated request waits for what the first has begun.
            if service.takes_data(row):
                document = await job_document(services, mesh, who)
                try:
                    await loading.upload(
                        job=job,
                        document=document.model_dump(mode="json"),
                        path=path,
                        label=f"export {destination}",
                        export_id=export_id,
                        edit={"id": row.id, **terms},
                    )
                    if wanted.preview:
                        return stored_document(edits, await service.preview(row))
                    await service.commit(who, row)
                except BaseException:
                    # Free the staged operands now rather than when the edit expires.
                    with suppress(ParamdError):
                        await service.abort(who, row)
                    raise
        return stored_document(edits, await edits.wait(row, wanted.wait_s))
