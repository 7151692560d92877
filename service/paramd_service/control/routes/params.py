"""What parameters there are. Their values come from the sidecars, never through here."""

from __future__ import annotations

import base64
from typing import Annotated

from fastapi import APIRouter, Query

from paramd.errors import ConflictError, UsageError
from paramd.layout.select import MAX_PATTERN_BYTES, select
from paramd.layout.types import TensorLayout
from paramd_service.control.models import ParamDocument, ParamPage
from paramd_service.control.routes.jobs import PROBLEMS, check_job
from paramd_service.control.services import Services

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

Pattern = Annotated[
    str, Query(min_length=1, max_length=MAX_PATTERN_BYTES, description="Glob over names")
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Tensors on a page")]
PageToken = Annotated[str, Query(max_length=256, description="From the page before")]


def router(services: Services) -> APIRouter:
    """/jobs/{job}/params."""
    routes = APIRouter(tags=["params"], responses=PROBLEMS)

    @routes.get("/jobs/{job}/params")
    async def list_params(
        job: str, pattern: Pattern = "*", limit: Limit = DEFAULT_LIMIT, page_token: PageToken = ""
    ) -> ParamPage:
        """Names, shapes, dtypes and placements of parameters and buffers."""
        check_job(services, job)
        digest, index = await services.layouts.get(services.registry.view())
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
