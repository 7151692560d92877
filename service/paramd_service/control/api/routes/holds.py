"""Hold training at a boundary, step it, resume it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from paramd_service.control.access.doorway import principal_of
from paramd_service.control.api.models import HoldDocument, HoldRequest, StepRequest
from paramd_service.control.api.services import Services
from paramd_service.control.edits.holds import Hold, HoldView


def router(services: Services) -> APIRouter:
    """/jobs/{job}/hold."""
    routes = APIRouter(tags=["holds"])

    def hold_of(job: str) -> Hold:
        services.jobs.get(job)
        return services.edits.hold(job)

    @routes.get("/jobs/{job}/hold")
    async def get_hold(job: str) -> HoldDocument:
        """Whether training is held at a boundary, and by whom."""
        return _document(await hold_of(job).view())

    @routes.post("/jobs/{job}/hold")
    async def begin_hold(job: str, wanted: HoldRequest, request: Request) -> HoldDocument:
        """Hold all ranks at one boundary; returns once they wait. Ends with its lease."""
        by = principal_of(request)
        return _document(await hold_of(job).begin(by, wanted.lease_s, wanted.holder))

    @routes.post("/jobs/{job}/hold/renew")
    async def renew_hold(job: str, wanted: HoldRequest, request: Request) -> HoldDocument:
        """Extend the lease, counted from now; trainers cap a hold at 300 s. Idempotent."""
        by = principal_of(request)
        return _document(await hold_of(job).renew(by, wanted.lease_s, wanted.holder))

    @routes.post("/jobs/{job}/hold/step")
    async def step_hold(job: str, wanted: StepRequest, request: Request) -> HoldDocument:
        """Let held training finish some updates and hold again, under the same lease."""
        by = principal_of(request)
        return _document(await hold_of(job).step(by, wanted.steps, wanted.holder))

    @routes.delete("/jobs/{job}/hold")
    async def end_hold(
        job: str,
        request: Request,
        holder: Annotated[
            str, Query(max_length=128, description="Holder returned by begin_hold")
        ] = "",
    ) -> HoldDocument:
        """Resume training. Idempotent."""
        return _document(await hold_of(job).end(principal_of(request), holder))

    return routes


def _document(view: HoldView) -> HoldDocument:
    return HoldDocument(
        state=view.state.value,
        holder=view.holder,
        step=view.step,
        steps_left=view.steps_left,
        lease_left_s=round(view.lease_left_s, 3),
        since_s=view.since_s,
    )
