"""Metric history: time series of ranks and of sampled parameters."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from paramd.errors import NotFoundError, UsageError
from paramd.layout.types import Layout, TensorLayout
from paramd_service.alerts.config import LOGGED
from paramd_service.alerts.service import Watchers
from paramd_service.control.access.doorway import may_read
from paramd_service.control.api.choice import check_large
from paramd_service.control.api.routes.paging import (
    INVALID,
    IncarnationNumber,
    PageToken,
    make_token,
    read_token,
)
from paramd_service.control.base.config import MAX_WORLD_SIZE
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.parts import ControlHost
from paramd_service.control.store.history import (
    LATEST_S,
    MAX_POINTS,
    series_name,
    series_of,
    subject_of,
)

MAX_SERIES = 5000
TOTAL = "total"
"""Subject of the norm of all gradients."""

Metric = Annotated[
    Literal["norm", "grad_norm", "step", "step_time_s", "stall_total_s"]
    | Annotated[str, StringConstraints(pattern=rf"^{LOGGED}[A-Za-z_][A-Za-z0-9_./-]{{0,59}}$")],
    Query(description=f"Which metric; {LOGGED}NAME is a number that the script logs"),
]
Subject = Annotated[
    str,
    Query(
        min_length=1,
        max_length=1024,
        description="For norms, a tensor's name, or total of grad_norm; else a rank, or (above 64 "
        "ranks) min, median or max over all ranks",
    ),
]
Time = Annotated[
    float | None, Query(ge=0, le=1e11, allow_inf_nan=False, description="Unix time in seconds")
]
Points = Annotated[
    int, Query(ge=1, le=MAX_POINTS, description="Most points; neighbours are merged to reach it")
]
Limit = Annotated[int, Query(ge=1, le=MAX_SERIES, description="Series on a page")]


class SeriesDocument(BaseModel):
    """A series that `get_history` can return."""

    metric: str = Field(
        description=f"norm, grad_norm, step, step_time_s, stall_total_s or {LOGGED}NAME"
    )
    subject: str = Field(
        description="A tensor's name, a rank, or min, median, max. A long name is cut and ends in "
        "a digest; pass it to get_history as it is"
    )


class SeriesPage(BaseModel):
    """A page of series."""

    incarnation: int
    series: list[SeriesDocument]
    next_page_token: str = Field(description="Pass it to get the next page; empty at the end")


class PointDocument(BaseModel):
    """A series within one span of time."""

    model_config = ConfigDict(from_attributes=True)

    time_s: float = Field(description="Begin of the span, seconds since the Unix epoch")
    span_s: float = Field(description="Its length; 0.001: one moment")
    step: int = Field(description="Highest step in it; -1 when unknown")
    mean: float | None = Field(description="Of the finite samples; null when there are none")
    min: float | None
    max: float | None
    count: int = Field(description="Finite samples")
    nonfinite_count: int


class HistoryDocument(BaseModel):
    """One series, oldest point first."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "incarnation": 3,
                    "metric": "norm",
                    "subject": "layers.0.up.weight",
                    "watch": True,
                    "points": [],
                }
            ]
        }
    )

    incarnation: int
    metric: str
    subject: str
    watch: bool = Field(description="Whether parameters are sampled: [alerts] watch")
    points: list[PointDocument]


def router(host: ControlHost, watchers: Watchers) -> APIRouter:
    routes = APIRouter(tags=["history"])
    _add_points(routes, host, watchers)
    _add_series(routes, host)
    return routes


def _add_series(routes: APIRouter, host: ControlHost) -> None:
    @routes.get("/jobs/{job}/history/series")
    async def list_series(
        job: str,
        incarnation: IncarnationNumber = None,
        limit: Limit = 1000,
        page_token: PageToken = "",
    ) -> SeriesPage:
        """Series of a run, by name; those begun in the last seconds may be missing."""
        last = host.jobs.get(job).number
        number = incarnation if incarnation is not None else last
        found = await host.records.history.series(
            job, number, after=_after(page_token), limit=limit
        )
        subjects = [subject_of(series) for series in found]
        return SeriesPage(
            incarnation=number,
            series=[SeriesDocument(metric=metric, subject=subject) for metric, subject in subjects],
            next_page_token=(
                make_token(found[-1].rank + 1, found[-1].name) if len(found) == limit else ""
            ),
        )


def _after(page_token: str) -> tuple[str, int] | None:
    """(name, rank) of the previous page's last series."""
    if not page_token:
        return None
    rank, name = read_token(page_token)
    # Database integers are smaller than ours, and PostgreSQL's text cannot hold NUL.
    if rank > MAX_WORLD_SIZE or "\0" in name:
        raise UsageError(INVALID)
    return name, rank - 1


async def _check_large(mesh: Incarnation, subject: str) -> None:
    """Raise DeniedError unless the tensor is so large that its norms reveal no values;
    NotFoundError or UnreachableError if its size is unknown. It is that in the job's current
    layout, also for a past run."""
    _, index = await mesh.layouts.get(mesh.registry.view())
    tensor = await asyncio.to_thread(_sampled, index.layout, subject)
    if tensor is None:
        raise NotFoundError(
            f"subject: the job has no tensor {subject[:100]!r} now, so its size is unknown; its "
            "norms need a reader's token"
        )
    check_large(tensor.fqn, tensor.numel)


def _sampled(layout: Layout, subject: str) -> TensorLayout | None:
    """The tensor of a series; the subject may be truncated, as in a series' name."""
    wanted = series_name("norm", subject)
    return next((one for one in layout.tensors if series_name("norm", one.fqn) == wanted), None)


def _add_points(routes: APIRouter, host: ControlHost, watchers: Watchers) -> None:
    @routes.get("/jobs/{job}/history")
    async def get_history(
        job: str,
        metric: Metric,
        subject: Subject,
        request: Request,
        begin_s: Time = None,
        end_s: Time = None,
        max_points: Points = MAX_POINTS,
        incarnation: IncarnationNumber = None,
    ) -> HistoryDocument:
        """A metric over time, by default over all of it. The longer a series, the longer the spans
        that its points sum up. Where nothing was measured there is no point. Norms exist for
        tensors that the watch sampled; those of small tensors need a reader's token.
        """
        mesh = host.jobs.get(job)
        of_tensor = metric == "norm" or (metric == "grad_norm" and subject != TOTAL)
        if of_tensor and not may_read(request):
            await _check_large(mesh, subject)
        found_incarnation = incarnation if incarnation is not None else mesh.number
        begin = begin_s if begin_s is not None else 0.0
        end = end_s if end_s is not None else LATEST_S
        if begin > end:
            raise UsageError(f"begin_s: {begin}; expected at most end_s ({end})")
        series = series_of(job, found_incarnation, metric, subject)
        points = await host.records.history.read(series, begin_s=begin, end_s=end, limit=max_points)
        return HistoryDocument(
            incarnation=found_incarnation,
            metric=metric,
            subject=subject,
            watch=watchers.config.watch,
            points=[PointDocument.model_validate(point) for point in points],
        )
