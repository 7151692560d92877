"""Control of training: pause, step and resume; restore points, rollbacks and hyper-parameters."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from paramd.mesh.edits.calls import Edit, Mark, PauseState
from paramd_service.control.access.doorway import principal_of
from paramd_service.control.mesh.jobs import Jobs
from paramd_service.edits.documents import (
    DroppedMark,
    GroupDocument,
    HyperparameterList,
    HyperparametersRequest,
    MarkList,
    MarkRequest,
    PauseRequest,
    RollbackRequest,
    StepRequest,
)
from paramd_service.edits.pauses import Pause
from paramd_service.edits.rest import stored_document
from paramd_service.edits.service import EditRegistry, EditService

MarkName = Annotated[str, Path(alias="mark", min_length=1, max_length=64, description="Its name")]


def pauses_router(jobs: Jobs, edits: EditRegistry) -> APIRouter:
    routes = APIRouter(tags=["pauses"])

    def pause_of(job: str) -> Pause:
        jobs.get(job)
        return edits.pause(job)

    @routes.get("/jobs/{job}/pause")
    async def get_pause(job: str) -> PauseState:
        """Whether training is paused at a boundary, and by whom."""
        return await pause_of(job).view()

    @routes.post("/jobs/{job}/pause")
    async def begin_pause(job: str, wanted: PauseRequest, request: Request) -> PauseState:
        """Pause all ranks at one boundary; returns once they wait. Ends with its lease."""
        by = principal_of(request)
        return await pause_of(job).begin(
            by, wanted.lease_s, wanted.holder, timeout_s=wanted.timeout_s, pause_id=wanted.id
        )

    @routes.post("/jobs/{job}/pause/renew")
    async def renew_pause(job: str, wanted: PauseRequest, request: Request) -> PauseState:
        """Extend the lease, counted from now; trainers cap a pause at 300 s. Idempotent."""
        by = principal_of(request)
        return await pause_of(job).renew(by, wanted.lease_s, wanted.holder)

    @routes.post("/jobs/{job}/pause/step")
    async def step_pause(job: str, wanted: StepRequest, request: Request) -> PauseState:
        """Let paused training finish some updates and pause again, under the same lease."""
        by = principal_of(request)
        return await pause_of(job).step(by, wanted.steps, wanted.holder)

    @routes.delete("/jobs/{job}/pause")
    async def end_pause(
        job: str,
        request: Request,
        holder: Annotated[
            str, Query(max_length=128, description="Holder returned by begin_pause")
        ] = "",
        id: Annotated[str, Query(max_length=32, description="End this pause alone")] = "",
    ) -> PauseState:
        """Resume training. Idempotent."""
        return await pause_of(job).end(principal_of(request), holder, id)

    return routes


def marks_router(jobs: Jobs, edits: EditRegistry) -> APIRouter:
    routes = APIRouter(tags=["marks"])

    def edits_of(job: str) -> EditService:
        jobs.get(job)
        return edits.service(job)

    @routes.get("/jobs/{job}/marks")
    async def list_marks(job: str) -> MarkList:
        """States to which training can return: restore points, standing snapshots of all ranks."""
        return MarkList(marks=[*await edits_of(job).marks.all()])

    @routes.post("/jobs/{job}/marks", status_code=201)
    async def create_mark(job: str, wanted: MarkRequest, request: Request) -> Mark:
        """Keep the complete state of the next common boundary under a name, in the sidecars'
        memory. Training is paused while it is copied."""
        return await edits_of(job).marks.make(principal_of(request), wanted.name)

    @routes.delete("/jobs/{job}/marks/{mark}")
    async def delete_mark(job: str, mark: MarkName, request: Request) -> DroppedMark:
        """Delete a restore point and free its memory. Idempotent."""
        return DroppedMark(dropped=await edits_of(job).marks.drop(principal_of(request), mark))

    @routes.post("/jobs/{job}/rollback", status_code=201)
    async def create_rollback(job: str, wanted: RollbackRequest, request: Request) -> Edit:
        """Return training to a restore point or a kept step: parameters, optimizer state and
        `extra_state`, on all ranks or on none. An edit: undo_edit goes forward again.
        Idempotent by id."""
        to = wanted.mark if wanted.mark is not None else wanted.step
        assert to is not None, "the model takes exactly one of them"
        by = principal_of(request)
        row = await edits_of(job).roll_back(by, wanted.id, to, wanted.note)
        return stored_document(edits, await edits.wait(row, wanted.wait_s))

    @routes.get("/jobs/{job}/hyperparameters")
    async def get_hyperparameters(job: str) -> HyperparameterList:
        """Learning rates and other hyper-parameters of all parameter groups, as rank 0 has them."""
        step, told = await jobs.get(job).statistics.optimizer_groups()
        groups = [
            GroupDocument(optimizer=number, group=at, values=dict(values))
            for number, of in enumerate(told)
            for at, values in enumerate(of)
        ]
        return HyperparameterList(step=step, groups=groups)

    @routes.post("/jobs/{job}/hyperparameters", status_code=201)
    async def set_hyperparameters(
        job: str, wanted: HyperparametersRequest, request: Request
    ) -> Edit:
        """Set hyper-parameters of a parameter group, on all ranks at one step or on none. An edit:
        undo_edit restores the old values. Idempotent by id."""
        asked = wanted.model_dump(include={"optimizer", "group", "values", "note"})
        row = await edits_of(job).change(principal_of(request), wanted.id, **asked)
        return stored_document(edits, await edits.wait(row, wanted.wait_s))

    return routes
