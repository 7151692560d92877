"""Parameters and buffers of a job: facts from the layout, statistics from the sidecars."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from paramd.errors import ConflictError
from paramd.filters import MAX_FILTER_BYTES, STATISTIC_KEYS, Filter, parse_filter, statistic
from paramd.layout.dtypes import item_bytes
from paramd.layout.types import Box, Piece, TensorLayout
from paramd_service.control.access.doorway import may_read
from paramd_service.control.api.choice import (
    MAX_ORDERED,
    absent_ranks,
    choose_one,
    choose_whole,
    picked,
)
from paramd_service.control.api.models import (
    MissingDocument,
    ParamDetail,
    ParamDocument,
    ParamPage,
    PieceDocument,
)
from paramd_service.control.api.routes.paging import Pages, make_token, read_token
from paramd_service.control.api.services import Services
from paramd_service.control.mesh.jobs import Incarnation

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MAX_PIECES = 4096

# Above this many tensors, filtering by facts would block the event loop for too long.
_MANY = 2000

_FACTS = {"name": "fqn", "dtype": "dtype", "numel": "numel"}
_ORDERS: dict[str, Callable[[Any], float]] = {
    "zeros": lambda one: one.zero_count / one.count if one.count else math.nan,
    "bad": lambda one: one.nan_count + one.inf_count,
}
"""What tensors are ordered by, besides the statistics of filters."""

Wanted = Annotated[
    str,
    Query(
        min_length=1,
        max_length=MAX_FILTER_BYTES,
        alias="filter",
        description="Globs over names, and terms that tensors must satisfy: `layers.*.weight "
        "numel>1M dtype=bfloat16 norm>10`",
        examples=["*", "layers.*.weight numel>1000"],
    ),
]
Name = Annotated[
    str,
    Query(
        min_length=1,
        max_length=MAX_FILTER_BYTES,
        description='One tensor; may end in a slice: "w[0:4, 8:16]"',
        examples=["layers.0.up.weight[0:4]"],
    ),
]
Sort = Annotated[
    str,
    Query(
        pattern=rf"^-?({'|'.join((*_FACTS, *_ORDERS, *STATISTIC_KEYS))})$|^$",
        description="Order: a fact or statistic, zeros (their share) or bad (NaN and infinite); "
        "- for the largest first",
    ),
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Tensors on a page")]
Buffers = Annotated[bool, Query(description="Include buffers; reading them needs running training")]
PageToken = Annotated[str, Query(max_length=256, description="From the previous page")]
IfNoneMatch = Annotated[
    str | None, Header(max_length=1024, description="ETag of a cached response")
]


@dataclass(frozen=True, slots=True)
class Found:
    """Tensors that a filter selected, and the state its statistics belong to."""

    tensors: tuple[TensorLayout, ...]
    missing: tuple[MissingDocument, ...] = ()
    incarnation: int = -1
    step: int = -1
    digest: str = ""
    unsettled: bool = False


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["params"])
    pages: Pages[Found] = Pages()
    _add_list(routes, services, pages)
    _add_detail(routes, services)
    return routes


def _add_list(routes: APIRouter, services: Services, pages: Pages[Found]) -> None:
    @routes.get(
        "/jobs/{job}/params",
        response_model=ParamPage,
        responses={304: {"description": "Unchanged since that ETag"}},
    )
    async def list_params(
        job: str,
        response: Response,
        request: Request,
        wanted: Wanted = "*",
        sort: Sort = "",
        limit: Limit = DEFAULT_LIMIT,
        page_token: PageToken = "",
        if_none_match: IfNoneMatch = None,
    ) -> ParamPage | Response:
        """Names, shapes, dtypes and placements of the matching parameters and buffers.

        Terms about statistics, and orders by them, are evaluated at one step. Buffers never match
        them, nor do small tensors if the caller may not read values.
        """
        mesh = services.host.jobs.get(job)
        found_filter = parse_filter(wanted)
        by_statistics = _needs_statistics(found_filter, sort)
        begin, name = read_token(page_token) if page_token else (0, "")
        # A reader's list may order small tensors by their values.
        of = f"{job} {may_read(request)}"
        if name:
            found = pages.get(name, of=of)
            digest = mesh.registry.view().layout_digest
            if found.digest != digest:
                raise ConflictError("page_token: the layout has changed; omit it to start over")
        else:
            found = await _find(mesh, found_filter, sort, reads=may_read(request))
        if not by_statistics:
            # Facts depend on the layout alone, so its digest is their ETag.
            if _is_held(if_none_match, found.digest):
                return Response(status_code=304, headers=_layout_headers(found.digest))
            response.headers.update(_layout_headers(found.digest))
        end = min(begin + limit, len(found.tensors))
        token = ""
        if end < len(found.tensors):
            # Without statistics a list depends on layout, filter and order alone.
            facts = f"{found.digest} {sort} {wanted}"
            shared = "" if by_statistics else hashlib.sha256(facts.encode()).hexdigest()[:16]
            name = name or pages.keep(found, of=of, name=shared)
            token = make_token(end, name)
        return ParamPage(
            layout_digest=found.digest,
            total_count=len(found.tensors),
            params=[document_of(tensor) for tensor in found.tensors[begin:end]],
            next_page_token=token,
            incarnation=found.incarnation,
            step=found.step,
            unsettled=found.unsettled,
            partial=bool(found.missing),
            missing=list(found.missing),
        )


def _add_detail(routes: APIRouter, services: Services) -> None:
    @routes.get(
        "/jobs/{job}/params/detail",
        response_model=ParamDetail,
        responses={304: {"description": "Unchanged since that ETag"}},
    )
    async def get_param(
        job: str, name: Name, response: Response, if_none_match: IfNoneMatch = None
    ) -> ParamDetail | Response:
        """One tensor, and which part of it each rank holds."""
        mesh = services.host.jobs.get(job)
        digest, index = await mesh.layouts.get(mesh.registry.view())
        if _is_held(if_none_match, digest):
            return Response(status_code=304, headers=_layout_headers(digest))
        tensor = choose_one(index, name).tensor
        response.headers.update(_layout_headers(digest))
        return ParamDetail(
            **document_of(tensor).model_dump(),
            layout_digest=digest,
            piece_count=len(tensor.pieces),
            pieces=[_piece(piece, tensor.dtype) for piece in tensor.pieces[:MAX_PIECES]],
        )


def _needs_statistics(wanted: Filter, sort: str) -> bool:
    return bool(wanted.statistics) or sort.removeprefix("-") not in ("", *_FACTS)


async def _find(mesh: Incarnation, wanted: Filter, sort: str, *, reads: bool) -> Found:
    view = mesh.registry.view()
    digest, index = await mesh.layouts.get(view)
    many, source = len(index.names) > _MANY, mesh.statistics
    # Ranks alone: reasons tell ages, which grow.
    choice = (digest, wanted.patterns, wanted.facts, reads, tuple(sorted(absent_ranks(view))))
    pick = partial(picked, view, index, wanted, reads=reads)
    if not _needs_statistics(wanted, sort):

        def listed() -> tuple[TensorLayout, ...]:
            found = choose_whole(index, wanted)
            return _in_order(((tensor, None) for tensor in found), sort) if sort else found

        slow = many and (wanted.facts or sort)
        found = await asyncio.to_thread(listed) if slow else listed()
        if reads and _MANY < len(found) <= MAX_ORDERED:
            # Whoever looks at so many orders them next.
            source.prepare(choice, index.layout, pick)
        return Found(found, digest=digest)
    rows = await source.kept(choice)
    if rows is None:
        rows = await source.rows(choice, digest, index.layout, pick)
    ready, (state, unsettled) = rows.ready, rows.state

    def ordered() -> tuple[TensorLayout, ...]:
        pairs = zip(ready.tensors, rows.columns.summaries(), strict=True)
        right = (pair for pair in pairs if wanted.matches_numbers(pair[1]))
        return _in_order(right if wanted.statistics else pairs, sort)

    found = await asyncio.to_thread(ordered) if many else ordered()
    return Found(found, tuple(ready.missing), state.incarnation, state.step, digest, unsettled)


def _in_order(rows: Iterable[tuple[TensorLayout, Any]], sort: str) -> tuple[TensorLayout, ...]:
    """What has no such number comes last, either way."""
    key = sort.removeprefix("-")
    if fact := _FACTS.get(key):
        found = sorted((tensor for tensor, _ in rows), key=attrgetter(fact), reverse=sort != key)
        return tuple(found)
    if key:
        read = _ORDERS.get(key, partial(statistic, key))
        pairs = [(tensor, read(numbers)) for tensor, numbers in rows]
        known = [pair for pair in pairs if not math.isnan(pair[1])]
        known.sort(key=itemgetter(1), reverse=sort != key)
        rows = [*known, *(pair for pair in pairs if math.isnan(pair[1]))]
    return tuple(tensor for tensor, _ in rows)


def document_of(tensor: TensorLayout) -> ParamDocument:
    return ParamDocument(
        name=tensor.fqn,
        kind=tensor.kind.value,
        aliases=list(tensor.aliases),
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        numel=tensor.numel,
        placement=tensor.placement,
        trainable=tensor.trainable,
    )


def _piece(piece: Piece, dtype: str) -> PieceDocument:
    region = piece.region
    box = isinstance(region, Box)
    return PieceDocument(
        rank=piece.rank,
        region="box" if box else "interval",
        begin=list(region.begin) if isinstance(region, Box) else [region.begin],
        end=list(region.end) if isinstance(region, Box) else [region.end],
        numel=region.numel,
        size_bytes=region.numel * item_bytes(dtype),
    )


def _layout_headers(digest: str) -> dict[str, str]:
    return {"etag": f'"{digest}"', "cache-control": "private, no-cache"}


def _is_held(if_none_match: str | None, digest: str) -> bool:
    if if_none_match is None:
        return False
    held = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return f'"{digest}"' in held
