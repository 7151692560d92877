"""A job's alerts, firing and resolved."""

from __future__ import annotations

import base64
import secrets
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from paramd.clock import now_s
from paramd.errors import NotFoundError, UsageError
from paramd_service.control.access.doorway import principal_of
from paramd_service.control.alerts.book import Alert, AlertDocument, alert_of, document
from paramd_service.control.alerts.config import Rule
from paramd_service.control.alerts.watcher import Watcher
from paramd_service.control.api.routes.paging import INVALID, begin_of, make_token
from paramd_service.control.api.services import Services
from paramd_service.control.store.silences import Silence

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


Note = Annotated[str, Field(max_length=1000, description="Reason; appears in the audit")]


class Acknowledgement(BaseModel):
    """Alerts that somebody has seen."""

    model_config = ConfigDict(extra="forbid")

    ids: list[Annotated[str, Field(max_length=200)]] = Field(
        min_length=1, max_length=MAX_LIMIT, description="Ids of firing alerts"
    )
    note: Note = ""


class SilenceRequest(BaseModel):
    """A silence to begin."""

    model_config = ConfigDict(extra="forbid")

    rule: Rule | None = Field(None, description="Only alerts of this rule; null: of every rule")
    subject: str = Field(
        "",
        max_length=1024,
        pattern=r"^[^\x00]*$",
        description="Only of this rank, tensor or mesh, as alerts name it; empty: of all",
    )
    for_s: float = Field(
        ge=60, le=2_592_000, allow_inf_nan=False, description="Its length in seconds"
    )
    note: Note = ""


class SilenceDocument(BaseModel):
    """Alerts that are kept quiet for a while. Times are in seconds since the Unix epoch."""

    id: str
    rule: str = Field(description="Empty: every rule")
    subject: str = Field(description="Empty: every subject")
    actor: str = Field(description="Who began it")
    note: str
    created_s: float
    until_s: float
    ended_s: float | None = Field(description="When it was ended early; null: it was not")


class SilenceList(BaseModel):
    """Silences in force."""

    silences: list[SilenceDocument]


SilenceId = Annotated[str, Path(max_length=32)]


def router(services: Services) -> APIRouter:
    """/jobs/{job}/alerts, /jobs/{job}/alert-silences."""
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
            alerts=[
                document(alert, silenced=watcher is not None and watcher.silenced(alert))
                for alert in page
            ],
            next_page_token=_page_token(page[-1]) if more else "",
        )

    _add_acknowledging(routes, services)
    _add_silences(routes, services)
    return routes


def _add_acknowledging(routes: APIRouter, services: Services) -> None:
    @routes.post("/jobs/{job}/alerts/acknowledge")
    async def acknowledge_alerts(job: str, wanted: Acknowledgement, request: Request) -> AlertPage:
        """Note that somebody has seen firing alerts: they go on firing, and count as seen until
        they are resolved or become critical. Ids that fire no longer are left out. Idempotent."""
        mesh, watcher, who = services.jobs.get(job), _watcher(services, job), principal_of(request)
        detail = {"ids": wanted.ids[:20], "count": len(wanted.ids), "note": wanted.note}
        async with services.records.recorded(who, "alerts.acknowledge", detail, mesh):
            found = watcher.acknowledge(wanted.ids, by=who.name, note=wanted.note)
            if not found:
                raise NotFoundError("ids: none of these alerts is firing now; see list_alerts")
        return AlertPage(
            incarnation=mesh.number,
            watch=services.watchers.config.watch,
            firing_count=len(watcher.book.firing),
            alerts=[document(alert, silenced=watcher.silenced(alert)) for alert in found],
            next_page_token="",
        )


def _add_silences(routes: APIRouter, services: Services) -> None:
    @routes.get("/jobs/{job}/alert-silences")
    async def list_silences(job: str) -> SilenceList:
        """Silences in force, oldest first."""
        services.jobs.get(job)
        found = _watcher(services, job).silences
        return SilenceList(silences=[_silence_document(one) for one in found])

    @routes.post("/jobs/{job}/alert-silences", status_code=201)
    async def create_silence(job: str, wanted: SilenceRequest, request: Request) -> SilenceDocument:
        """Keep alerts of a rule, of a subject or both quiet for a while, in this incarnation and
        later ones: they are listed, but not posted to webhooks and not counted as open."""
        if not wanted.rule and not wanted.subject:
            raise UsageError("rule, subject: expected at least one of them")
        mesh, watcher, who = services.jobs.get(job), _watcher(services, job), principal_of(request)
        began_s = now_s()
        one = Silence(
            id=secrets.token_hex(8),
            job=job,
            rule=wanted.rule.value if wanted.rule is not None else "",
            subject=wanted.subject,
            actor=who.name,
            note=wanted.note,
            created_s=began_s,
            until_s=began_s + wanted.for_s,
        )
        detail = wanted.model_dump(mode="json") | {"id": one.id}
        async with services.records.recorded(who, "alerts.silence", detail, mesh):
            await watcher.silence(one)
        return _silence_document(one)

    @routes.delete("/jobs/{job}/alert-silences/{silence}")
    async def end_silence(job: str, silence: SilenceId, request: Request) -> SilenceDocument:
        """End a silence now."""
        mesh, watcher, who = services.jobs.get(job), _watcher(services, job), principal_of(request)
        async with services.records.recorded(who, "alerts.unsilence", {"id": silence}, mesh):
            return _silence_document(await watcher.end_silence(silence))


def _watcher(services: Services, job: str) -> Watcher:
    watcher = services.watchers.get(job)
    if watcher is None:
        raise NotFoundError(f"job {job[:64]!r} is not watched")
    return watcher


def _silence_document(one: Silence) -> SilenceDocument:
    return SilenceDocument(
        id=one.id,
        rule=one.rule,
        subject=one.subject,
        actor=one.actor,
        note=one.note,
        created_s=one.created_s,
        until_s=one.until_s,
        ended_s=one.ended_s,
    )


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
