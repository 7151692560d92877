"""What parameters there are. Their values come from the sidecars, never through here."""

from __future__ import annotations

import base64
import math
from typing import Annotated

from fastapi import APIRouter, Query

from paramd.errors import ConflictError, UsageError
from paramd.layout.select import MAX_PATTERN_BYTES, select
from paramd.layout.types import TensorLayout
from paramd.mesh.results import TensorStats
from paramd_service.control.models import ParamDocument, ParamPage, StatsDocument, StatsList
from paramd_service.control.routes.jobs import PROBLEMS
from paramd_service.control.services import Services

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MAX_STATS = 1000

Pattern = Annotated[
    str, Query(min_length=1, max_length=MAX_PATTERN_BYTES, description="Glob over names")
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Tensors on a page")]
Buffers = Annotated[bool, Query(description="Buffers too; reading them needs training to go on")]
Histogram = Annotated[bool, Query(description="Count binary exponents too")]
PageToken = Annotated[str, Query(max_length=256, description="From the page before")]


def router(services: Services) -> APIRouter:
    """/jobs/{job}/params, /jobs/{job}/params/stats."""
    routes = APIRouter(tags=["params"], responses=PROBLEMS)

    @routes.get("/jobs/{job}/params")
    async def list_params(
        job: str, pattern: Pattern = "*", limit: Limit = DEFAULT_LIMIT, page_token: PageToken = ""
    ) -> ParamPage:
        """Names, shapes, dtypes and placements of parameters and buffers."""
        mesh = services.jobs.get(job)
        digest, index = await mesh.layouts.get(mesh.registry.view())
        begin = _begin(page_token, digest)
        chosen = select(index, pattern, with_buffers=True)
        page = chosen[begin : begin + limit]
        end = begin + len(page)
        return ParamPage(
            layout_digest=digest,
            total_count=len(chosen),
            params=[_document(item.tensor) for item in page],
            next_page_token=_page_token(digest, end) if end < len(chosen) else "",
        )

    @routes.get("/jobs/{job}/params/stats")
    async def get_stats(
        job: str, pattern: Pattern, buffers: Buffers = False, histogram: Histogram = False
    ) -> StatsList:
        """Statistics of every tensor that matches, reduced where the tensors lie."""
        mesh = services.jobs.get(job)
        _, index = await mesh.layouts.get(mesh.registry.view())
        matching = len(select(index, pattern, with_buffers=buffers))
        if matching > MAX_STATS:
            raise UsageError(
                f"pattern: {matching} tensors match; at most {MAX_STATS} at once, narrow it"
            )
        table = await mesh.statistics.get(
            pattern, with_buffers=buffers, with_histogram=histogram
        )
        return StatsList(
            epoch=table.epoch,
            step=table.step,
            stats=[_stats(row) for row in table],
            total=_stats(table.total),
        )

    return routes


def _page_token(digest: str, begin: int) -> str:
    return base64.urlsafe_b64encode(f"{begin}:{digest}".encode()).decode()


def _begin(page_token: str, digest: str) -> int:
    """First item of the page. Raises UsageError or ConflictError for a foreign token."""
    if not page_token:
        return 0
    try:
        begin, _, of = base64.urlsafe_b64decode(page_token).decode().partition(":")
        first = int(begin)
    except ValueError:
        raise UsageError("page_token: not one of ours; leave it out to begin anew") from None
    if first < 0:
        raise UsageError("page_token: not one of ours; leave it out to begin anew")
    if of != digest:
        raise ConflictError("page_token: the layout has changed; leave it out to begin anew")
    return first


def _document(tensor: TensorLayout) -> ParamDocument:
    return ParamDocument(
        fqn=tensor.fqn,
        aliases=list(tensor.aliases),
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        numel=tensor.numel,
        kind=tensor.kind.value,
        placement=tensor.placement,
    )


def _stats(row: TensorStats) -> StatsDocument:
    found = row.summary
    return StatsDocument(
        name=row.name,
        dtype=row.dtype,
        shape=list(row.shape),
        count=found.count,
        zero_count=found.zero_count,
        nan_count=found.nan_count,
        inf_count=found.inf_count,
        norm=_finite(found.norm),
        mean=_finite(found.mean),
        std=_finite(found.std),
        min=_finite(found.min),
        max=_finite(found.max),
        exponents=list(found.exponents),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
