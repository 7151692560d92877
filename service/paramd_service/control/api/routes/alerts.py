"""What is, and lately was, wrong with a job."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from paramd.errors import UsageError
from paramd_service.control.alerts.book import Alert, AlertDocument, alert_of, document
from paramd_service.control.api.routes.jobs import PROBLEMS
from paramd_service.control.api.routes.paging import make_token, read_token
from paramd_service.control.api.services import Services

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MAX_INCARNATION = 2**53

_PAST = "alerts"

Wanted = Annotated[
    Literal["firing", "resolved", "all"], Query(description="What lasts, what is over, or both")
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Alerts on a page")]
Incarnation = Annotated[
    int | None, Query(ge=1, le=MAX_INCARNATION, description="By default the job's last one")
]
PageToken = Annotated[str, Query(max_length=512, description="From the page before")]


class AlertPage(BaseModel):
    """A page of alerts: what fires first, then what is over; the newest first in both."""

    incarnation: int = Field(description="Whose alerts these are")
    watch: bool = Field(description="Whether parameters are sampled: [alerts] watch")
    firing_count: int = Field(
        description="Alerts that fire now, on all pages; 0 of a past incarnation"
    )
    alerts: list[AlertDocument]
    next_page_token: str = Field(description="Ask with it for the next page; empty at the end")


def router(services: Services) -> APIRouter:
    """/jobs/{job}/alerts."""
    routes = APIRouter(tags=["alerts"], responses=PROBLEMS)

    @routes.get("/jobs/{job}/alerts")
    async def list_alerts(
        job: str,
        state: Wanted = "firing",
        limit: Limit = DEFAULT_LIMIT,
        page_token: PageToken = "",
        incarnation: Incarnation = None,
    ) -> AlertPage:
        """Alerts of the job's last incarnation, as they stand now; of a past one as they were kept:
        the newest first, and firing where the control plane ended before they were over."""
        mesh = services.jobs.get(job)
        if incarnation is not None and incarnation != mesh.number:
            return await _past(services, job, incarnation, state, limit, page_token)
        watcher = services.watchers.get(job)
        firing = watcher.book.firing if watcher is not None else ()
        resolved = watcher.book.resolved if watcher is not None else ()
        chosen = [
            *(firing if state != "resolved" else ()),
            *(resolved if state != "firing" else ()),
        ]
        begin = _begin(chosen, page_token)
        page = chosen[begin : begin + limit]
        more = begin + len(page) < len(chosen)
        return AlertPage(
            incarnation=mesh.number,
            watch=services.watchers.config.watch,
            firing_count=len(firing),
            alerts=[document(alert) for alert in page],
            next_page_token=_page_token(page[-1]) if more else "",
        )

    return routes


async def _past(
    services: Services, job: str, incarnation: int, state: str, limit: int, page_token: str
) -> AlertPage:
    before_id: int | None = None
    if page_token:
        before_id, name = read_token(page_token)
        if name != _PAST:
            raise UsageError("page_token: not one of ours; leave it out to begin anew")
    rows = await services.records.alerts.page(
        job,
        limit=limit,
        before_id=before_id,
        only_open=state == "firing",
        only_resolved=state == "resolved",
        incarnation=incarnation,
    )
    found = [alert for row in rows if (alert := alert_of(row)) is not None]
    return AlertPage(
        incarnation=incarnation,
        watch=services.watchers.config.watch,
        firing_count=0,
        alerts=[document(alert) for alert in found],
        next_page_token=make_token(rows[-1].id, _PAST) if len(rows) == limit else "",
    )


def _page_token(last: Alert) -> str:
    return base64.urlsafe_b64encode(last.id.encode()).decode()


def _begin(alerts: list[Alert], page_token: str) -> int:
    """Index after the alert that the token names.

    Raises:
        UsageError: no token of ours, or that alert is not listed any more.
    """
    if not page_token:
        return 0
    try:
        last = base64.urlsafe_b64decode(page_token).decode()
    except ValueError:
        raise UsageError("page_token: not one of ours; leave it out to begin anew") from None
    for index, alert in enumerate(alerts):
        if alert.id == last:
            return index + 1
    raise UsageError("page_token: its alert is not listed any more; leave it out to begin anew")
