"""A job's alerts, as its control plane lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args
from urllib.parse import quote, urlencode

from paramd.errors import UsageError
from paramd.mesh.peers.control import RestClient, read_document, readable
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.results import Table, ranks_text

AlertState = Literal["all", "firing", "resolved"]

_PAGE: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One problem, from when it was first found until it was last found.

    Times are in seconds since the Unix epoch, by the control plane's clock.
    """

    id: str
    incarnation: int
    rule: str
    """For example "non-finite" or "stale-rank"; docs/alerts.md lists them."""
    subject: str
    """What it concerns: a rank, a tensor, the mesh."""
    severity: str
    """warning or critical."""
    state: str
    """firing or resolved."""
    reason: str
    ranks: tuple[int, ...]
    name: str
    """Tensor it concerns; empty for none."""
    step: int
    """Step it was last found at; -1 for none."""
    first_seen_s: float
    last_seen_s: float
    resolved_s: float | None
    """None while it fires."""

    @property
    def firing(self) -> bool:
        return self.state == "firing"


class Alerts(Table[Alert]):
    """Alerts of one incarnation: those firing, then those resolved, each newest first."""

    columns = (
        ("severity", lambda row: row.severity),
        ("rule", lambda row: row.rule),
        ("state", lambda row: row.state),
        ("since", lambda row: _time_text(row.first_seen_s)),
        ("ranks", lambda row: ranks_text(row.ranks)),
        ("reason", lambda row: row.reason),
    )
    row_type = Alert
    about = ("job", "incarnation", "watch")
    job: str
    incarnation: int
    watch: bool
    """Whether parameters are sampled, without which some rules find nothing."""

    def summary(self) -> str:
        return (
            f"{sum(row.firing for row in self)} of {len(self)} alerts of {self.job!r} firing "
            f"(incarnation {self.incarnation})"
            + ("" if self.watch else "; parameters are not being sampled")
        )


async def ask_alerts(
    rest: RestClient,
    reach: SidecarFinder,
    state: AlertState,
    incarnation: int | None,
    limit: int,
) -> Alerts:
    """Up to `limit` alerts, over as many pages as it takes. Raises as `AsyncMesh.alerts`."""
    if state not in get_args(AlertState):
        raise UsageError(f"state: {state!r}; expected one of {', '.join(get_args(AlertState))}")
    if limit < 1:
        raise UsageError(f"limit: {limit}; expected at least 1")
    job = reach.document.job
    rows: dict[str, Alert] = {}
    token = ""
    while True:
        query = {"state": state, "limit": str(min(_PAGE, limit - len(rows)))}
        query |= {"incarnation": str(incarnation)} if incarnation is not None else {}
        query |= {"page_token": token} if token else {}
        path = f"/jobs/{quote(job, safe='')}/alerts?{urlencode(query)}"
        found = await rest.send("GET", path)
        with readable(rest.url):
            # By id: one that is resolved between two pages is listed on both.
            rows |= {row.id: row for row in map(parse_alert, found["alerts"])}
            token = str(found["next_page_token"])
            of, watch = int(found["incarnation"]), bool(found["watch"])
        if not token or len(rows) >= limit:
            # All that fire come with the first page.
            return Alerts(list(rows.values())[:limit], job=job, incarnation=of, watch=watch)


def parse_alert(found: Mapping[str, Any]) -> Alert:
    """Parse an AlertDocument. Raises KeyError, TypeError or ValueError."""
    return read_document(Alert, found, ranks=tuple(map(int, found["ranks"])))


def _time_text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
