"""Gradient statistics per update, as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from paramd.errors import ParamdError, UsageError, codes_of
from paramd.filters import parse_filter
from paramd_service.control.access.doorway import may_read
from paramd_service.control.api.choice import NormHistory, choose, pattern_of, without_small
from paramd_service.control.api.routes.params import Wanted
from paramd_service.control.api.services import Services
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.records.events import RETRY_MS

if TYPE_CHECKING:
    from paramd.mesh.frames.frames import GradFrame

MAX_NAMES = 2000
"""Most gradients in one frame; the dashboard shows far fewer."""


class GradKind(StrEnum):
    """What a frame has of each gradient."""

    STATS = "stats"
    HISTOGRAM = "histogram"


_KINDS: dict[GradKind, Literal["stats", "histogram"]] = {
    GradKind.STATS: "stats",
    GradKind.HISTOGRAM: "histogram",
}

Every = Annotated[int, Query(ge=1, le=1_000_000, description="A frame every so many updates")]
Kind = Annotated[GradKind, Query(description="histogram adds counts of binary exponents")]
Frames = AsyncGenerator["GradFrame[Any]", None]


def router(services: Services) -> APIRouter:
    """/jobs/{job}/grads."""
    routes = APIRouter(tags=["grads"])
    norms = NormHistory(services.records.history.offer)

    async def followed(
        job: str, wanted: Wanted, request: Request, every: Every = 1, kind: Kind = GradKind.STATS
    ) -> AsyncIterator[Frames]:
        # A dependency, so that a refusal gets its own status before the response starts.
        mesh = services.jobs.get(job)
        patterns = await _patterns(mesh, wanted, reads=may_read(request))
        async with aclosing(
            mesh.statistics.gradients(patterns, every=every, kind=_KINDS[kind])
        ) as frames:
            yield frames

    following = Depends(followed)

    @routes.get("/jobs/{job}/grads", response_class=EventSourceResponse)
    async def follow_grads(job: str, frames: Frames = following) -> AsyncIterator[ServerSentEvent]:
        """Statistics of the gradients consumed by every n-th update, over all ranks.

        Events of kind frame:
        `{job, incarnation, step, dropped, clip: {factor}, scale, total, params}`.
        Frames that a slow reader misses are dropped and counted; training never waits. The last
        event is of kind end: the training detached, or a status and detail give the error. A
        comment every 15 s keeps the connection alive.
        """
        try:
            async for frame in frames:
                document = frame.document()
                norms.take(document)
                yield ServerSentEvent(
                    raw_data=json.dumps(document, allow_nan=False, separators=(",", ":")),
                    event="frame",
                    id=f"{frame.incarnation}-{frame.step}",
                    retry=RETRY_MS,
                )
            problem: dict[str, Any] = {"status": 200, "detail": "the training has detached"}
        except ParamdError as error:
            problem = {"status": codes_of(error).http, "detail": str(error)}
        yield ServerSentEvent(raw_data=json.dumps(problem), event="end")

    return routes


async def _patterns(mesh: Incarnation, wanted: str, *, reads: bool) -> list[str]:
    found = parse_filter(wanted)
    if found.statistics:
        raise UsageError("filter: terms about statistics cannot select gradients; use globs")
    _, index = await mesh.layouts.get(mesh.registry.view())
    chosen, small = without_small(choose(index, found, with_buffers=False), may_read=reads)
    if len(chosen) > MAX_NAMES:
        raise UsageError(
            f"filter: {len(chosen):,} gradients match; at most {MAX_NAMES:,} in one stream"
        )
    # Streams with the same globs share one capture; names selected by facts do not.
    by_glob = not found.facts and not small
    return list(found.patterns) if by_glob else [pattern_of(item) for item in chosen]
