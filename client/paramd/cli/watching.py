"""One job as its control plane sees it, looked at again and again: for `alerts` and `top`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paramd.cli.settings import Settings
from paramd.errors import ParamdError

if TYPE_CHECKING:
    from paramd.mesh.rest import RestClient

MAX_ALERTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What was true of a job at one moment."""

    job: str
    epoch: int
    ranks: list[dict[str, Any]]
    """As REST has them, ordered by rank."""
    alerts: list[dict[str, Any]]
    """What fires, the newest first."""
    at_s: float
    """On the monotonic clock."""

    @property
    def step(self) -> int:
        """Lowest step of a rank that is known; -1 when none is."""
        return min((rank["step"] for rank in self.ranks if rank["step"] >= 0), default=-1)


class Door:
    """Asks one control plane about one job."""

    def __init__(self, client: RestClient, job: str) -> None:
        self._client = client
        self.job = job

    @property
    def url(self) -> str:
        """Where the numbers come from."""
        return self._client.url

    async def alerts(self, state: str = "firing") -> dict[str, Any]:
        """Alerts by state: "firing", "resolved" or "all". Raises ParamdErrors."""
        path = f"/jobs/{quote(self.job, safe='')}/alerts?state={state}&limit={MAX_ALERTS}"
        return dict(await self._client.send("GET", path))

    async def look(self) -> Look:
        """Ranks and what fires. Raises ParamdErrors."""
        alerts = await self.alerts()
        ranks = await self._client.ranks(self.job)
        return Look(
            job=self.job,
            epoch=int(alerts["epoch"]),
            ranks=ranks,
            alerts=list(alerts["alerts"]),
            at_s=time.monotonic(),
        )


@asynccontextmanager
async def open_door(chosen: Settings) -> AsyncIterator[Door]:
    """The way to the job that settings name.

    Raises:
        UsageError: none was named, and there is not exactly one.
        UnreachableError, DeniedError: as they say.
    """
    from paramd.mesh.connect import resolve
    from paramd.mesh.rest import RestClient
    from paramd.tls import ClientTls

    url, token, job = resolve(chosen.url, chosen.token, chosen.job)
    client = RestClient(url, token, tls=ClientTls.from_environment(chosen.tls_ca))
    try:
        yield Door(client, job if job is not None else await _only_job(client))
    finally:
        await client.close()


async def _only_job(client: RestClient) -> str:
    from paramd.errors import UsageError

    jobs = await client.jobs()
    if len(jobs) != 1:
        found = ", ".join(sorted(jobs)) or "none"
        raise UsageError(f"--job: name one; {client.url} serves {found}")
    return jobs[0]


class Outage:
    """What a watching command says of errors: each once, and when they are over."""

    def __init__(self) -> None:
        self._said = ""

    def news(self, error: ParamdError | None) -> str:
        """A line to say, or "" when there is nothing new."""
        text = str(error) if error is not None else ""
        before, self._said = self._said, text
        if text == before:
            return ""
        return text or "it answers again"
