"""Other jobs of the state dir, for two runs to be compared: their runs and their metric history."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from paramd.errors import DeniedError
from paramd.places import IncarnationRecord
from paramd_service.alerts.history import (
    HistoryDocument,
    Limit,
    Metric,
    PointDocument,
    Points,
    SeriesDocument,
    SeriesPage,
    Subject,
)
from paramd_service.control.access.doorway import principal_of
from paramd_service.control.parts import ControlHost
from paramd_service.control.records.past import OtherRecords
from paramd_service.control.store.history import series_of, subject_of

Number = Annotated[int, Query(ge=1, le=2**31 - 1, description="Which of its runs")]


class OtherJob(BaseModel):
    """A job that this control plane does not serve."""

    job: str
    incarnations: list[IncarnationRecord] = Field(description="Its runs, oldest first")


class OtherJobs(BaseModel):
    """Other jobs of the state dir, the one that began last first."""

    jobs: list[OtherJob]


def router(host: ControlHost) -> APIRouter:
    routes = APIRouter(tags=["history"])
    records = OtherRecords(lambda: host.config.store)

    @routes.get("/other-jobs")
    async def list_other_jobs(request: Request) -> OtherJobs:
        """Jobs of this state dir with a control plane of their own, running or ended. Empty for all
        but the owner, who could read their files as well."""
        if not _is_owner(request):
            return OtherJobs(jobs=[])
        found = await records.jobs([one.job for one in host.jobs.all()])
        return OtherJobs(jobs=[OtherJob(job=one.job, incarnations=one.runs) for one in found])

    @routes.get("/other-jobs/{job}/series")
    async def list_other_series(
        job: str, incarnation: Number, request: Request, limit: Limit = 1000
    ) -> SeriesPage:
        """The first series of a run of another job, by name. For the owner."""
        _check_owner(request)
        async with records.history(job) as history:
            found = await history.series(job, incarnation, limit=limit)
        subjects = [subject_of(series) for series in found]
        return SeriesPage(
            incarnation=incarnation,
            series=[SeriesDocument(metric=metric, subject=subject) for metric, subject in subjects],
            next_page_token="",
        )

    @routes.get("/other-jobs/{job}/history")
    async def get_other_history(
        job: str,
        incarnation: Number,
        metric: Metric,
        subject: Subject,
        request: Request,
        max_points: Points = 500,
    ) -> HistoryDocument:
        """A metric over all of a run of another job. For the owner."""
        _check_owner(request)
        async with records.history(job) as history:
            points = await history.read(
                series_of(job, incarnation, metric, subject), limit=max_points
            )
        return HistoryDocument(
            incarnation=incarnation,
            metric=metric,
            subject=subject,
            watch=False,
            points=[PointDocument.model_validate(point) for point in points],
        )

    return routes


def _is_owner(request: Request) -> bool:
    # An admin of this job is none of the others, which have tokens of their own.
    return principal_of(request).token_id is None


def _check_owner(request: Request) -> None:
    if not _is_owner(request):
        raise DeniedError(
            "records of other jobs are for the owner of this control plane; a token of that job "
            "reads them at its own (paramd dashboard --job)"
        )
