"""Statistics, histograms, heat maps and values of tensors, computed by the sidecars."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from paramd.errors import ConflictError, DeniedError, UnreachableError
from paramd.filters import parse_filter
from paramd.layout.select import SelectedTensor
from paramd_service.control.access.doorway import may_read
from paramd_service.control.access.roles import ELEMENTS_OF_BIN
from paramd_service.control.api.choice import check_few, choose_one, picked, split, without_small
from paramd_service.control.api.models import (
    HeatmapDocument,
    HistogramDocument,
    StatsDocument,
    StatsList,
    ValuesDocument,
)
from paramd_service.control.api.routes.params import Buffers, Name, Wanted
from paramd_service.control.api.services import Services
from paramd_service.control.mesh.jobs import Incarnation

if TYPE_CHECKING:
    from paramd.mesh.results import TensorStats

MAX_BINS = 512
MAX_CELLS = 512


Mode = Annotated[
    Literal["mean", "absmax", "min", "max"],
    Query(description="How a cell summarizes its finite elements"),
]
Histogram = Annotated[bool, Query(description="Count binary exponents too")]
Bins = Annotated[int, Query(ge=1, le=MAX_BINS, description="Bins of equal width")]
Bound = Annotated[
    float | None, Query(allow_inf_nan=False, description="Default: the outermost finite element")
]
Cells = Annotated[int, Query(ge=1, le=MAX_CELLS, description="Most cells in this direction")]
RowDims = Annotated[
    int | None,
    Query(
        ge=0, le=16, description="How many leading dims form the rows; default 1, or 0 for a vector"
    ),
]


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["params"])
    _add_numbers(routes, services)
    _add_heatmap(routes, services)
    _add_values(routes, services)
    return routes


def _add_numbers(routes: APIRouter, services: Services) -> None:
    @routes.get("/jobs/{job}/params/stats")
    async def get_stats(
        job: str,
        wanted: Wanted,
        request: Request,
        buffers: Buffers = False,
        histogram: Histogram = False,
    ) -> StatsList:
        """Statistics of every matching tensor, all at one step.

        The total covers the tensors selected by globs and facts, including those that terms about
        statistics drop. Tensors of unavailable ranks are listed as missing, and so are small
        tensors if the caller may not read values.
        """
        mesh = services.host.jobs.get(job)
        found_filter = parse_filter(wanted)
        view = mesh.registry.view()
        _, index = await mesh.layouts.get(view)
        reads, few = may_read(request), not found_filter.statistics
        present, missing = picked(view, index, found_filter, reads=reads, buffers=buffers, few=few)
        table = await mesh.statistics.get(
            [item.pattern for item in present], with_buffers=buffers, with_histogram=histogram
        )
        if len(table) != len(present):
            raise ConflictError("the layout changed during the request; try again")
        stats = [_row(row) for row in table if found_filter.matches_numbers(row.summary)]
        check_few(stats)
        return StatsList(
            incarnation=table.incarnation,
            step=table.step,
            unsettled=table.unsettled,
            stats=stats,
            total=_row(table.total),
            partial=bool(missing),
            missing=missing,
        )

    @routes.get("/jobs/{job}/params/histogram")
    async def get_histogram(
        job: str,
        name: Name,
        request: Request,
        bins: Bins = 64,
        low: Bound = None,
        high: Bound = None,
    ) -> HistogramDocument:
        """Histogram of one tensor with equal bins. Binary exponents come with get_stats.

        A caller who may not read values gets no small tensors, no more than one bin per 16
        elements, and no bounds of its own.
        """
        mesh = services.host.jobs.get(job)
        item = await _one(mesh, name)
        if not may_read(request):
            without_small([item], may_read=False)
            bins = min(bins, item.box.numel // ELEMENTS_OF_BIN)
            if low is not None or high is not None:
                raise DeniedError(
                    "low, high: freely chosen bounds reveal values, which needs a reader's token"
                )
        table, edges = await mesh.statistics.histogram(item.pattern, bins=bins, low=low, high=high)
        found = table.total.summary
        counts = found.edge_counts if found.edge_counts else (0,) * (len(edges) + 1)
        return HistogramDocument(
            incarnation=table.incarnation,
            step=table.step,
            unsettled=table.unsettled,
            name=item.name,
            edges=edges,
            counts=list(counts[1:-1]),
            below_count=counts[0],
            above_count=counts[-1],
            nan_count=found.nan_count,
            inf_count=found.inf_count,
        )


def _add_heatmap(routes: APIRouter, services: Services) -> None:
    @routes.get("/jobs/{job}/params/heatmap", response_model=HeatmapDocument)
    async def get_heatmap(
        job: str,
        name: Name,
        mode: Mode = "mean",
        rows: Cells = 128,
        columns: Cells = 128,
        row_dims: RowDims = None,
    ) -> Response:
        """Heat map of one tensor or a slice of it; zoom in with a smaller slice."""
        mesh = services.host.jobs.get(job)
        item = await _one(mesh, name)
        read, shown = await mesh.statistics.heatmap(
            item.pattern, mode=mode, rows=rows, columns=columns, row_dims=row_dims
        )
        document: dict[str, Any] = {
            "incarnation": read.state.incarnation,
            "step": read.state.step,
            "unsettled": read.unsettled,
            "name": item.name,
            "mode": mode,
            "shape": shown.matrix.shape,
            "row_dims": shown.matrix.row_dims,
            "row_count": shown.matrix.rows,
            "col_count": shown.matrix.columns,
            "cell_row_count": shown.heatmap.rows,
            "cell_col_count": shown.heatmap.columns,
            "nonfinite": shown.heatmap.nonfinite,
        }
        # Hand-written JSON: pydantic would take a second for a quarter of a million numbers.
        cells = ",".join("null" if math.isnan(v) else f"{v:.7g}" for v in shown.heatmap.values)
        text = json.dumps(document, allow_nan=False)[:-1] + f', "values": [{cells}]}}'
        return Response(text, media_type="application/json")


def _add_values(routes: APIRouter, services: Services) -> None:
    @routes.get("/jobs/{job}/params/values")
    async def get_values(job: str, name: Name) -> ValuesDocument:
        """Elements of one tensor or a slice of it, as exact text."""
        mesh = services.host.jobs.get(job)
        item = await _one(mesh, name)
        read, texts = await mesh.statistics.values(item.pattern)
        return ValuesDocument(
            incarnation=read.state.incarnation,
            step=read.state.step,
            unsettled=read.unsettled,
            name=item.name,
            dtype=item.tensor.dtype,
            begin=list(item.box.begin),
            shape=list(item.box.sizes),
            values=texts,
        )


async def _one(mesh: Incarnation, name: str) -> SelectedTensor:
    """The only tensor that matches. Raises UnreachableError if it is not available."""
    view = mesh.registry.view()
    _, index = await mesh.layouts.get(view)
    item = choose_one(index, name)
    _, missing = split([item], view)
    if missing:
        raise UnreachableError(f"{item.name}: {missing[0].reason}; try again in a few seconds")
    return item


def _row(row: TensorStats) -> StatsDocument:
    shown = {"name": row.name, "dtype": row.dtype, "shape": list(row.shape)}
    exponents = [list(one) for one in row.summary.exponents]
    return StatsDocument(**shown, **row.summary.document(), exponents=exponents)
