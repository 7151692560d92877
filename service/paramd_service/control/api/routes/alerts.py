"""A job's alerts, firing and resolved."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from paramd.errors import UsageError
from paramd_service.control.alerts.book import Alert, AlertDocument, alert_of, document
from paramd_service.control.api.routes.paging import INVALID, begin_of, make_token
from paramd_service.control.api.services import Services

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MAX_INCARNATION = 2**53

_PAST = "alerts"

Wanted = Annotated[
    Literal["firing", "resolved", "all"], Query(description="Alerts in this state, or all")
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Alerts on a page")]
Incarnation = Annotated[
    int | None, Query(ge=1, le=MAX_INCARNATION, description="Default: the job's last one")
]
PageToken = Annotated[str, Query(max_length=512, description="From the previous page")]


class AlertPage(BaseModel):
    """A page of alerts: firing ones, then resolved ones, each newest first."""

    incarnation: int = Field(description="The alerts' incarnation")
    watch: bool = Field(description="Whether parameters are sampled: [alerts] watch")
    firing_count: int = Field(
        description="Alerts firing now, on all pages; 0 for a past incarnation"
    )
    alerts: list[AlertDocument]
    next_page_token: str = Field(description="Pass it to get the next page; empty at the end")


def router(services: Services) -> APIRouter:
    """/jobs/{job}/alerts."""
    routes = APIRouter(tags=["alerts"])

    @routes.get("/jobs/{job}/alerts")
    async def list_alerts(
        job: str,
        state: Wanted = "firing",
        limit: Limit = DEFAULT_LIMIT,
        page_token: PageToken = "",
        incarnation: Incarnation = None,
    ) -> AlertPage:
        """Alerts of the job's last incarnation as they are now, or of a past one as stored.

        Past alerts come newest first, and are still firing if the control plane ended before
        they were resolved.
        """
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
    rows = await services.records.alerts.page(
        job,
        limit=limit,
        before_id=begin_of(page_token, _PAST),
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
        UsageError: the token is not ours, or its alert is no longer listed.
    """
    if not page_token:
        return 0
    try:
        last = base64.urlsafe_b64decode(page_token).decode()
    except ValueError:
        raise UsageError(INVALID) from None
    for index, alert in enumerate(alerts):
        if alert.id == last:
            return index + 1
    raise UsageError("page_token: its alert is no longer listed; omit it to start over")
