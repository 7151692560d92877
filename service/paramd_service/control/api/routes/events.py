"""A job's events, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from fastapi.sse import EventSourceResponse
from starlette.responses import StreamingResponse

from paramd_service.control.api.services import Services
from paramd_service.control.records.events import Event

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


def router(services: Services) -> APIRouter:
    """/jobs/{job}/events."""
    routes = APIRouter(tags=["events"])

    async def followed(
        job: str, last_event_id: LastEventId = None
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        # A dependency, so that a refusal gets its own status before the response starts.
        services.jobs.get(job)
        async with services.events.follow(job=job, after=last_event_id, quiet_s=QUIET_S) as events:
            yield events

    following = Depends(followed)

    # Not as response_class: FastAPI would encode each event again for each viewer.
    @routes.get(
        "/jobs/{job}/events", response_class=StreamingResponse, openapi_extra={"responses": _SAID}
    )
    async def follow_events(
        job: str, events: AsyncGenerator[Event, None] = following
    ) -> EventSourceResponse:
        """Changes of ranks, steps (once a second), incarnations, alerts and snapshots.

        Kinds: hello (first), gap (`missed` events are no longer kept; -1: unknown number),
        rank, step, incarnation, alert, snapshot. A comment every 15 s keeps the connection
        alive. A client that stops reading is disconnected and resumes with Last-Event-ID.
        """
        return EventSourceResponse(_frames(events), headers=_HEADERS)

    return routes


async def _frames(events: AsyncGenerator[Event, None]) -> AsyncIterator[bytes]:
    """Encoded once, shared by all viewers."""
    async for event in events:
        yield event.frame
