"""`paramd status`: the state of every rank; and the REST client that other commands poll with."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO
from urllib.parse import quote

import typer

from paramd.cli import ended
from paramd.cli.ended import Past
from paramd.cli.options import Format, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, seconds, size, terminal_width
from paramd.cli.shell import one_line, say
from paramd.errors import ParamdError, PartialError, UnreachableError, UsageError

if TYPE_CHECKING:
    from paramd.mesh.peers.control import RestClient
    from paramd.mesh.results import MeshStatus

MAX_ALERTS = 1000

CLEAR = "\033[H\033[2J"

Watch = Annotated[bool, typer.Option("-w", "--watch", help="Keep refreshing until Ctrl-C.")]
Every = Annotated[
    float, typer.Option("--every", min=0.2, max=3600.0, help="Seconds between refreshes.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A job's ranks and firing alerts at one moment."""

    job: str
    incarnation: int
    ranks: list[dict[str, Any]]
    """As REST returns them, ordered by rank."""
    alerts: list[dict[str, Any]]
    """Those firing, newest first."""
    at_s: float
    """Monotonic clock."""

    @property
    def step(self) -> int:
        """The lowest known step of any rank; -1 if none is known."""
        return min((rank["step"] for rank in self.ranks if rank["step"] >= 0), default=-1)


LOOK_COLUMNS = (
    "RANK",
    "PHASE",
    "STEP",
    "STEP TIME",
    "STALLS",
    "STALLED",
    "ARENA",
    "SNAPSHOTS",
    "NOTE",
)


def cells(rank: dict[str, Any]) -> tuple[str, ...]:
    """One rank as a row of `LOOK_COLUMNS`."""
    joined = rank["membership"] in ("joined", "silent")
    return (
        str(rank["rank"]),
        rank["phase"] if joined else rank["membership"],
        count(rank["step"]) if rank["step"] >= 0 else "-",
        seconds(rank["step_time_ns"] / 1e9) if rank["step_time_ns"] else "-",
        count(rank["stall_count"]),
        seconds(rank["stall_total_ns"] / 1e9),
        size(rank["arena_bytes"]),
        size(rank["snapshot_bytes"]),
        one_line(rank["reason"]),
    )


def about_text(seen: Look) -> str:
    """The job in one line."""
    step = count(seen.step) if seen.step >= 0 else "-"
    return (
        f"job {seen.job}  incarnation {seen.incarnation}  step {step}  {len(seen.ranks)} ranks  "
        f"{len(seen.alerts)} alerts"
    )


def alert_line(alert: dict[str, Any]) -> str:
    """One alert in one line."""
    return f"{alert['severity']:<9} {alert['rule']:<16} {one_line(alert['reason'])}"


def text_of(seen: Look) -> list[str]:
    """What `paramd top` shows, as lines."""
    rows = [LOOK_COLUMNS, *(cells(rank) for rank in seen.ranks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [about_text(seen), *lines, *map(alert_line, seen.alerts)]


class Door:
    """Queries one control plane about one job."""

    def __init__(self, client: RestClient, job: str) -> None:
        self._client = client
        self.job = job

    @property
    def url(self) -> str:
        """The control plane's."""
        return self._client.url

    async def alerts(self, state: str = "firing") -> dict[str, Any]:
        """Alerts by state: "firing", "resolved" or "all". Raises ParamdErrors."""
        path = f"/jobs/{quote(self.job, safe='')}/alerts?state={state}&limit={MAX_ALERTS}"
        return dict(await self._client.send("GET", path))

    async def look(self) -> Look:
        """Ranks and firing alerts. Raises ParamdErrors."""
        alerts = await self.alerts()
        ranks = await self._client.ranks(self.job)
        return Look(
            job=self.job,
            incarnation=int(alerts["incarnation"]),
            ranks=ranks,
            alerts=list(alerts["alerts"]),
            at_s=time.monotonic(),
        )


@asynccontextmanager
async def open_door(target: Target) -> AsyncIterator[Door]:
    """A connection to the job in the settings, or else to the control plane's only job.

    Raises:
        UsageError: no job was named, and the control plane does not have exactly one.
        UnreachableError, DeniedError: from the control plane.
    """
    async with target.rest() as (client, job):
        yield Door(client, job if job is not None else await _only_job(client))


async def _only_job(client: RestClient) -> str:
    jobs = await client.jobs()
    if len(jobs) != 1:
        found = ", ".join(sorted(jobs)) or "no jobs"
        raise UsageError(f"give --job; {client.url} serves {found}")
    return jobs[0]


class Outage:
    """What a watching command reports of errors: each one once, then the recovery."""

    def __init__(self) -> None:
        self._said = ""

    def news(self, error: ParamdError | None) -> str:
        """The line to print; "" if nothing changed."""
        text = str(error) if error is not None else ""
        before, self._said = self._said, text
        if text == before:
            return ""
        return text or "connection restored"


COLUMNS = (
    Column("rank", "RANK", right=True),
    Column("phase", "PHASE"),
    Column("step", "STEP", lambda step: count(step) if step >= 0 else "-", right=True),
    Column("step_time_s", "STEP TIME", lambda s: seconds(s) if s else "-", right=True, drop=1),
    Column("stall_count", "STALLS", count, right=True, drop=2),
    Column("stall_total_s", "STALLED", seconds, right=True, drop=3),
    Column("arena_bytes", "ARENA", size, right=True, drop=5),
    Column("snapshot_bytes", "SNAPSHOTS", size, right=True, drop=4),
    Column("reason", "NOTE"),
)


@with_target
def status(target: Target, watch: Watch = False, every: Every = 2.0, output: Output = None) -> None:
    """Show the state of every rank of a job.

    STALLS counts updates that waited for a copy, STALLED is the total wait.
    Exits with code 6 if a rank is unreachable or unhealthy. --watch keeps
    refreshing until Ctrl-C regardless. For a job that has ended, it prints when,
    and after which step.
    """
    past = ended.find(target)
    if past is not None:
        ended.emit_status(past, target.format)
        return
    try:
        with target.connect() as mesh:
            if watch:
                follow(mesh.status, target.format, every_s=every)
            found = mesh.status()
            name, url = mesh.job, mesh.url
    except UnreachableError:
        past = _just_ended(target, None)
        if past is None:
            raise
        ended.emit_status(past, target.format)
        return
    if all(row.phase == "unreachable" for row in found):
        past = _just_ended(target, name)
        if past is not None:
            ended.emit_status(past, target.format)
            return
    emit(listing(found), target.format)
    say(f"job {found.job}, incarnation {found.incarnation}, step {found.step}")
    if target.format is Format.TABLE:
        say(f"dashboard: {url} (paramd dashboard opens it, signed in)")
    if found and all(row.phase in ("orphaned", "torn") for row in found):
        say(f"the training has ended; to free its memory: paramd end {found.job}")
    # A rank held on request is healthy.
    bad = [row.rank for row in found if row.reason and row.phase != "held"]
    if bad or len(found) < found.world_size:
        raise PartialError(
            f"{len(found) - len(bad)} of {found.world_size} ranks are healthy; see column NOTE, "
            "the sidecar logs in the state dir, and: paramd doctor"
        )


def _just_ended(target: Target, job: str | None) -> Past | None:
    """The job if it has ended, according to its control plane or, once that is gone, on disk.

    An end takes a moment: the sidecars leave first, which alone would look like an outage.
    """

    async def ask() -> Past | None:
        async with target.rest() as (client, named):
            name = job if job is not None else named
            last = await ended.found_ended(client, name) if name is not None else None
            return Past(str(name), last) if last is not None else None

    with suppress(ParamdError):
        found = asyncio.run(ask())
        if found is not None:
            return found
    named = job if job is not None else target.settings.job
    with suppress(ParamdError):
        return ended.find(target.named(named)) if named is not None else None
    return None


def follow(
    look: Callable[[], MeshStatus], form: Format, *, every_s: float, out: TextIO | None = None
) -> NoReturn:
    """Print the state every `every_s`; a terminal is redrawn in place."""
    if form is Format.JSON:
        raise UsageError("--output: json cannot be streamed; use -o jsonl with --watch")
    out = out if out is not None else sys.stdout
    clears = out.isatty() and form.is_table
    outage = Outage()
    while True:
        began_s = time.monotonic()
        try:
            found = look()
        except ParamdError as error:
            said = outage.news(error)
        else:
            said = outage.news(None)
            text = io.StringIO()
            emit(listing(found), form, out=text, width=terminal_width(out))
            head = (
                f"job {found.job}, incarnation {found.incarnation}, step {found.step}, {_now()}\n"
            )
            out.write((CLEAR if clears else "") + (head if form.is_table else ""))
            out.write(text.getvalue())
            out.flush()
        if said:
            say(said)
        time.sleep(max(began_s + every_s - time.monotonic(), 0.05))


def _now() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")


def listing(found: MeshStatus) -> Listing:
    """One row per rank."""
    return Listing(
        name="ranks",
        rows=[asdict(row) for row in found],
        columns=COLUMNS,
        about={"job": found.job, "incarnation": found.incarnation, "world_size": found.world_size},
        id_key="rank",
    )
