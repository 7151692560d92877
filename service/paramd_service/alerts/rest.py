"""A job's alerts, firing and resolved."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from paramd.errors import ConflictError
from paramd.mesh.insight.reports import Alert
from paramd_service.alerts.service import Watchers
from paramd_service.alerts.store import State
from paramd_service.control.access.doorway import principal_of
from paramd_service.control.api.models import JobSummary, VerdictDocument
from paramd_service.control.api.models import Request as Body
from paramd_service.control.api.routes.jobs import summary_of, verdict_of_job
from paramd_service.control.api.routes.paging import (
    IncarnationNumber,
    PageToken,
    begin_of,
    make_token,
)
from paramd_service.control.parts import ControlHost

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

_LIST = "alerts"

Wanted = Annotated[
    Literal["firing", "resolved", "all"], Query(description="Alerts in this state, or all")
]
Limit = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_LIMIT,
        description="Alerts on a page; the first page also has all that fire now",
    ),
]


class WatchRequest(Body):
    """Whether to sample parameters and gradients."""

    on: bool = Field(description="Whether they are sampled from now on")


class AlertPage(BaseModel):
    """A page of alerts: firing ones, then resolved ones, each newest first."""

    incarnation: int = Field(description="The alerts' run")
    watch: bool = Field(description="Whether the last round checked for NaN and Inf")
    verdict: VerdictDocument | None = Field(
        description="The verdict on the job now; null for a past run"
    )
    firing_count: int = Field(description="Alerts firing now, on all pages; 0 for a past run")
    alerts: list[Alert]
    next_page_token: str = Field(description="Pass it to get the next page; empty at the end")


def router(host: ControlHost, watchers: Watchers) -> APIRouter:
    routes = APIRouter(tags=["alerts"])

    @routes.get("/jobs/{job}/alerts")
    async def list_alerts(
        job: str,
        state: Wanted = "firing",
        limit: Limit = DEFAULT_LIMIT,
        page_token: PageToken = "",
        incarnation: IncarnationNumber = None,
    ) -> AlertPage:
        """Alerts of the job's last run, or of a past one as stored.

        Past alerts come newest first, and are still firing if the control plane ended before
        they were resolved.
        """
        mesh = host.jobs.get(job)
        number = incarnation if incarnation is not None else mesh.number
        watcher = watchers.get(job) if number == mesh.number else None
        firing = watcher.book.firing if watcher is not None else ()
        begin = begin_of(page_token, _LIST)
        rows = []
        # Firing alerts are in memory: newer than in the store, and available without one.
        if watcher is None or state != "firing":
            rows = await watchers.store.page(
                job,
                limit=limit,
                before=begin,
                state=State.RESOLVED if watcher else State(state) if state != "all" else None,
                incarnation=number,
            )
        shown = firing if begin is None and state != "resolved" else ()
        return AlertPage(
            incarnation=number,
            watch=watcher is not None and watcher.looks_at_values,
            verdict=verdict_of_job(host, mesh) if number == mesh.number else None,
            firing_count=len(firing),
            alerts=[*shown, *(alert for _, alert in rows)],
            next_page_token=make_token(rows[-1][0], _LIST) if len(rows) == limit else "",
        )

    @routes.post("/jobs/{job}/watch")
    async def set_watch(job: str, wanted: WatchRequest, request: Request) -> JobSummary:
        """Turn the sampling of parameters and gradients on or off, until the run ends.

        What it costs is bounded by watch_share in [alerts]. Idempotent."""
        mesh = host.jobs.get(job)
        watcher = watchers.get(job)
        if watcher is None or mesh.over is not None:
            raise ConflictError(f"job {job!r} has ended; there is nothing to watch")
        who = principal_of(request)
        async with host.records.recorded(who, "job.watch", wanted.model_dump(), mesh):
            watcher.turn(wanted.on)
        return summary_of(host, mesh, mesh.registry.view())

    return routes
