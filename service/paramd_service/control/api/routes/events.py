"""What happens to a job, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from fastapi.sse import EventSourceResponse
from starlette.responses import StreamingResponse

from paramd_service.control.api.routes.jobs import PROBLEMS
from paramd_service.control.api.services import Services
from paramd_service.control.records.events import Event

QUIET_S = 15.0
"""Longest silence of a stream: proxies end idle connections after a minute or so."""

# What FastAPI says of streams that it writes itself.
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
        description="Go on after this event; what is not kept any more is said in a gap event",
    ),
]


def router(services: Services) -> APIRouter:
    """/jobs/{job}/events."""
    routes = APIRouter(tags=["events"], responses=PROBLEMS)

    async def followed(
        job: str, last_event_id: LastEventId = None
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        # Before the answer begins: a refusal has a status of its own.
        services.jobs.get(job)
        async with services.events.follow(job=job, after=last_event_id, quiet_s=QUIET_S) as events:
            yield events

    following = Depends(followed)

    # Not as its response_class: FastAPI would write each event anew for each viewer.
    @routes.get(
        "/jobs/{job}/events", response_class=StreamingResponse, openapi_extra={"responses": _SAID}
    )
    async def follow_events(
        job: str, events: AsyncGenerator[Event, None] = following
    ) -> EventSourceResponse:
        """Changes of ranks, steps (once a second), incarnations, alerts and snapshots.

        Kinds: hello (first), gap (`missed` events are not kept; -1 when nobody knows how
        many), rank, step, incarnation, alert, snapshot. A comment every 15 s keeps the line alive.
        A reader that does not read is disconnected, and goes on with Last-Event-ID.
        """
        return EventSourceResponse(_frames(events), headers=_HEADERS)

    return routes


async def _frames(events: AsyncGenerator[Event, None]) -> AsyncIterator[bytes]:
    """Bytes that all viewers share."""
    async for event in events:
        yield event.frame
