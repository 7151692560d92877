"""What happens to a job, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent

from paramd_service.control.events import Event
from paramd_service.control.routes.jobs import PROBLEMS
from paramd_service.control.services import Services

RETRY_MS = 2000
"""When a browser shall come back after the stream broke."""

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
        async with services.events.follow(job=job, after=last_event_id) as events:
            yield events

    following = Depends(followed)

    @routes.get("/jobs/{job}/events", response_class=EventSourceResponse)
    async def follow_events(
        job: str, events: AsyncGenerator[Event, None] = following
    ) -> AsyncIterator[ServerSentEvent]:
        """Changes of ranks, steps (once a second), epochs, alerts and snapshots.

        Kinds: hello (first), gap (`missed` events are not kept; -1 when nobody knows how
        many), rank, step, epoch, alert, snapshot. A comment every 15 s keeps the line alive.
        A reader that does not read is disconnected, and goes on with Last-Event-ID.
        """
        async for event in events:
            yield ServerSentEvent(
                raw_data=event.text, event=event.kind, id=event.id, retry=RETRY_MS
            )

    return routes
