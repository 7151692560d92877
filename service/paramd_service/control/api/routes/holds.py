"""Holding the training at a boundary, stepping it, letting it go."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from paramd_service.control.access.doorway import principal_of
from paramd_service.control.api.models import HoldDocument, HoldRequest, StepRequest
from paramd_service.control.api.routes.jobs import PROBLEMS
from paramd_service.control.api.services import Services
from paramd_service.control.edits.holds import Hold, HoldView


def router(services: Services) -> APIRouter:
    """/jobs/{job}/hold."""
    routes = APIRouter(tags=["holds"], responses=PROBLEMS)

    def hold_of(job: str) -> Hold:
        services.jobs.get(job)
        return services.edits.hold(job)

    @routes.get("/jobs/{job}/hold")
    async def get_hold(job: str) -> HoldDocument:
        """Whether training waits at a boundary on request, and who holds it."""
        return _document(await hold_of(job).view())

    @routes.post("/jobs/{job}/hold")
    async def begin_hold(job: str, wanted: HoldRequest, request: Request) -> HoldDocument:
        """Have all ranks wait at one boundary; answers when they do. The lease ends by itself."""
        by = principal_of(request)
        return _document(await hold_of(job).begin(by, wanted.lease_s, wanted.holder))

    @routes.post("/jobs/{job}/hold/renew")
    async def renew_hold(job: str, wanted: HoldRequest, request: Request) -> HoldDocument:
        """Let the lease end later, counted from now; trainers cap a hold at 300 s. Idempotent."""
        by = principal_of(request)
        return _document(await hold_of(job).renew(by, wanted.lease_s, wanted.holder))

    @routes.post("/jobs/{job}/hold/step")
    async def step_hold(job: str, wanted: StepRequest, request: Request) -> HoldDocument:
        """Let held training finish some updates and wait again, under the same lease."""
        by = principal_of(request)
        return _document(await hold_of(job).step(by, wanted.steps, wanted.holder))

    @routes.delete("/jobs/{job}/hold")
    async def end_hold(
        job: str,
        request: Request,
        holder: Annotated[str, Query(max_length=128, description="As begin_hold named it")] = "",
    ) -> HoldDocument:
        """Let training go on. Idempotent."""
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
