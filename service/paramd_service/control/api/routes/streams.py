"""Server-sent events: the events of a job, and gradient statistics per update."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.responses import StreamingResponse

from paramd.errors import ParamdError, UsageError, codes_of
from paramd.filters import parse_filter
from paramd_service.control.access.doorway import may_read
from paramd_service.control.api.choice import NormHistory, choose, without_small
from paramd_service.control.api.routes.params import Wanted
from paramd_service.control.api.services import Services
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.records.events import RETRY_MS, Event

if TYPE_CHECKING:
    from paramd.mesh.frames.frames import GradFrame

QUIET_S = 15.0
"""Keepalive period: proxies end idle connections after a minute or so."""

# The schema FastAPI gives to streams that it encodes itself.
_ITEM = {
    "type": "object",
    "properties": {
        "data": {"type": "string"},
        "event": {"type": "string"},
        "id": {"type": "string"},
        "retry": {"type": "integer", "minimum": 0},
    },
}
_SAID = {"200": {"content": {"text/event-stream": {"itemSchema": _ITEM}}}}

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        max_length=64,
        description="Resume after this event; a gap event counts those no longer kept",
    ),
]

MAX_NAMES = 2000
"""Most gradients in one frame; the dashboard shows far fewer."""


def events_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["events"])

    async def followed(
        job: str, last_event_id: LastEventId = None
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        # A dependency, so that a refusal gets its own status before the response starts.
        host = services.host
        host.jobs.get(job)
        async with host.events.follow(job=job, after=last_event_id, quiet_s=QUIET_S) as events:
            yield events

    following = Depends(followed)

    # Not as response_class: FastAPI would encode each event again for each viewer.
    @routes.get(
        "/jobs/{job}/events", response_class=StreamingResponse, openapi_extra={"responses": _SAID}
    )
    async def follow_events(
        job: str, events: AsyncGenerator[Event, None] = following
    ) -> EventSourceResponse:
        """Changes of ranks, steps (once a second), runs, alerts and snapshots.

        Kinds: hello (first), gap (`missed` events are no longer kept; -1: unknown number),
        rank, step, incarnation, alert, snapshot. A comment every 15 s keeps the connection
        alive. A client that stops reading is disconnected and resumes with Last-Event-ID.
        """
        return EventSourceResponse(_frames(events), headers=_HEADERS)

    return routes


async def _frames(events: AsyncGenerator[Event, None]) -> AsyncIterator[bytes]:
    """Frames encoded once for all viewers."""
    async for event in events:
        yield event.frame


Every = Annotated[int, Query(ge=1, le=1_000_000, description="A frame every so many updates")]
Kind = Annotated[
    Literal["stats", "histogram"], Query(description="histogram adds counts of binary exponents")
]
Frames = AsyncGenerator["GradFrame[Any]", None]


def grads_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["grads"])
    norms = NormHistory(services.host.records.history.offer)

    async def followed(
        job: str, wanted: Wanted, request: Request, every: Every = 1, kind: Kind = "stats"
    ) -> AsyncIterator[Frames]:
        # A dependency, so that a refusal gets its own status before the response starts.
        mesh = services.host.jobs.get(job)
        patterns = await _patterns(mesh, wanted, reads=may_read(request))
        stream = mesh.statistics.gradients(patterns, every=every, kind=kind)
        async with aclosing(stream) as frames:
            yield frames

    following = Depends(followed)

    @routes.get("/jobs/{job}/grads", response_class=EventSourceResponse)
    async def follow_grads(
        job: str, wanted: Wanted, request: Request, frames: Frames = following
    ) -> AsyncIterator[ServerSentEvent]:
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
                # Another filter's total is another quantity, and may reveal an element's value.
                norms.take(document, whole=wanted == "*" and may_read(request))
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
    return list(found.patterns) if by_glob else [item.pattern for item in chosen]
