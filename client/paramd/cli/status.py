"""`paramd status` and `alerts`: a job as it is now; the REST client that both poll with."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO
from urllib.parse import quote

from typer import Argument, Option

from paramd import places
from paramd.cli import ended
from paramd.cli.ended import Past
from paramd.cli.options import Every, Target, with_output
from paramd.cli.output import (
    Column,
    Format,
    Listing,
    count,
    emit,
    seconds,
    size,
    terminal_width,
    when,
)
from paramd.cli.parts import LOOK, CommandPart, Commands
from paramd.cli.shell import one_line, say
from paramd.documents import read_document
from paramd.errors import NotFoundError, ParamdError, PartialError, UnreachableError, UsageError

if TYPE_CHECKING:
    from paramd.mesh.peers.control import RestClient
    from paramd.mesh.results import MeshStatus

MAX_ALERTS = 1000
ALERTS_EVERY_S = 2.0
ANSWER_S = 4.0
"""Longest wait of `paramd jobs`: 2 s for the control planes, and 2 s for sidecars."""

CLEAR = "\033[H\033[2J"


def _step_text(step: int) -> str:
    return count(step) if step >= 0 else "-"


COLUMNS = (
    Column("rank", "RANK", right=True),
    Column("phase", "PHASE"),
    Column("step", "STEP", _step_text, right=True),
    Column("step_time_s", "STEP TIME", lambda s: seconds(s) if s else "-", right=True, drop=1),
    Column("stall_count", "STALLS", count, right=True, drop=2),
    Column("stall_total_s", "STALLED", seconds, right=True, drop=3),
    Column("arena_bytes", "ARENA", size, right=True, drop=5),
    Column("snapshot_bytes", "SNAPSHOTS", size, right=True, drop=4),
    Column("reason", "NOTE"),
)


JOB_COLUMNS = (
    Column("job", "JOB"),
    Column("state", "STATE"),
    Column("incarnation", "RUN", right=True),
    Column("world_size", "RANKS", right=True),
    Column("step", "STEP", _step_text, right=True),
    Column("began_s", "BEGAN", when, drop=2),
    Column("ended_s", "ENDED", when),
    Column("url", "URL", drop=1),
)

ENDED_SHOWN = 5
"""Jobs that `paramd jobs` lists if none runs: those that ended last."""


@with_output
def jobs(
    target: Target,
    all_: Annotated[bool, Option("--all", help="Also those that do not run.")] = False,
) -> None:
    """List the jobs on this host, of this user.

    If none runs, a table lists those that ended last.
    """
    running = {one.job: one for one in places.running_jobs()}

    async def ask() -> list[tuple[str, int]]:
        return await asyncio.gather(*(_state_of(target.at(one)) for one in running.values()))

    states = dict(zip(running, asyncio.run(ask()), strict=True))
    rows = []
    for job in places.known_jobs():
        state, step = states.get(job, ("", -1))
        starts = not state and places.is_starting(job)
        row = _row_of_job(job, "starting" if starts else state or "ended", step)
        rows.append(row | {"url": running[job].url if job in running else ""})
    current = [row for row in rows if row["state"] != "ended"]
    if all_ or current or not target.format.is_table:
        target.show("jobs", rows if all_ else current, JOB_COLUMNS, id_key="job")
        return
    last = sorted(rows, key=lambda row: row["ended_s"] or row["began_s"] or 0.0)[-ENDED_SHOWN:]
    target.show("jobs", last[::-1], JOB_COLUMNS, id_key="job")
    if len(rows) > len(last):
        say(f"no job runs here; these ended last. All {len(rows)}: paramd jobs --all")
    else:
        say(f"no job runs here{'; these have ended' if rows else ''}")


def _row_of_job(job: str, state: str, step: int) -> dict[str, Any]:
    """A row of `JOB_COLUMNS` without its url; `step` is the one of a job that has not ended."""
    row: dict[str, Any] = {"job": job, "state": state, "step": step}
    if state == "starting":
        # What is stored is of the run before.
        return row | {"incarnation": None, "world_size": None, "began_s": None, "ended_s": None}
    last = places.incarnations(job)[-1:]
    found = asdict(last[0]) if last else {}
    if state == "ended":
        row["step"] = found.get("step", -1)
    return row | {
        "incarnation": found.get("incarnation"),
        "world_size": found.get("world_size"),
        "began_s": found.get("began_s"),
        "ended_s": found.get("ended_s") if state == "ended" else None,
    }


async def _state_of(target: Target) -> tuple[str, int]:
    """The state and the step of a job with a control plane: its trainers may all have ended."""
    try:
        async with asyncio.timeout(ANSWER_S), target.async_connect() as mesh:
            found = await mesh.status()
    except (ParamdError, TimeoutError):
        return "unreachable", -1
    phases = {row.phase for row in found}
    if phases == {"unreachable"}:
        return "unreachable", found.step
    if phases - {"orphaned", "torn"}:
        return "running", found.step
    return "torn" if "torn" in phases else "orphaned", found.step


class Door:
    """Queries one control plane about one job."""

    def __init__(self, client: RestClient, job: str) -> None:
        self._client = client
        self.job = job

    @property
    def url(self) -> str:
        """URL of the control plane."""
        return self._client.url

    async def alerts(self, state: str = "firing") -> dict[str, Any]:
        """Alerts by state: "firing", "resolved" or "all". Raises ParamdErrors."""
        path = f"/jobs/{quote(self.job, safe='')}/alerts?state={state}&limit={MAX_ALERTS}"
        return dict(await self._client.send("GET", path))

    async def verdict(self) -> dict[str, Any]:
        """The control plane's verdict on the job. Raises ParamdErrors."""
        return _verdict_on(self.job, await self._client.send("GET", "/jobs"))

    async def watch(self, *, on: bool) -> dict[str, Any]:
        """Turn the sampling of parameters and gradients on or off; return the verdict. Raises
        ParamdErrors."""
        path = f"/jobs/{quote(self.job, safe='')}/watch"
        return dict((await self._client.send("POST", path, {"on": on}))["verdict"])


@asynccontextmanager
async def open_door(target: Target) -> AsyncIterator[Door]:
    """A connection to the job in the settings, or else to the control plane's only job.

    Raises UsageError if no job was named and the control plane does not have exactly one, else the
    control plane's UnreachableError or DeniedError.
    """
    async with target.rest() as (client, job):
        jobs = [job] if job is not None else await client.jobs()
        if len(jobs) != 1:
            found = ", ".join(sorted(jobs)) or "no jobs"
            raise UsageError(f"give --job; {client.url} serves {found}")
        yield Door(client, jobs[0])


class Outage:
    """Reports a watching command's errors: each one once, then the recovery."""

    def __init__(self) -> None:
        self._said = ""

    def tell(self, error: ParamdError | None) -> None:
        """Print what is new, if anything."""
        text = str(error) if error is not None else ""
        if text != self._said:
            say(text or "connection restored")
        self._said = text


def _check_streamed(form: Format) -> None:
    if form is Format.JSON:
        raise UsageError("--output: json cannot be streamed; use -o jsonl with --watch")


@with_output
def status(
    target: Target,
    watch: Annotated[bool, Option("-w", "--watch", help="Keep refreshing until Ctrl-C.")] = False,
    every: Every = 2.0,
) -> None:
    """Show the state of every rank of a job.

    STALLS counts updates that waited for a copy, STALLED is the total wait.
    Exits with code 6 if a rank is unreachable or unhealthy. --watch keeps
    refreshing until Ctrl-C regardless. For a job that has ended, it prints when,
    and after which step.
    """
    past = ended.find(target)
    if past is None:
        try:
            with target.connect() as mesh:
                if watch:
                    health = partial(_health, target, mesh.job)
                    follow(mesh.status, health, target.format, every_s=every)
                found = mesh.status()
                name, url = mesh.job, mesh.url
        except UnreachableError:
            past = _just_ended(target, None)
            if past is None:
                raise
        else:
            if all(row.phase == "unreachable" for row in found):
                past = _just_ended(target, name)
    if past is not None:
        ended.show_status(target, past)
        return
    emit(listing(found), target.format)
    if all(row.phase == "unreachable" for row in found) and _is_starting(target, found.job):
        raise PartialError(
            f"job {found.job!r}, run {found.incarnation}, is starting: none of its "
            f"{found.world_size} ranks has joined yet; try again in a few seconds"
        )
    say(_head(found))
    if target.format is Format.TABLE:
        say(_health(target, found.job))
        say(f"dashboard: {url} (paramd dashboard opens it, signed in)")
    if found and all(row.phase in ("orphaned", "torn") for row in found):
        # How to go on comes first: cleanup ends what a restart would go on from.
        say(
            "the training has ended; to go on from its last step, start the script again (with "
            "attach(..., resume='auto'))"
        )
        say(f"to give that up and free its memory: paramd cleanup {found.job}")
    bad = [row.rank for row in found if not row.healthy]
    if bad or len(found) < found.world_size:
        raise PartialError(
            f"{len(found) - len(bad)} of {found.world_size} ranks are healthy; see column NOTE, "
            "the sidecar logs in the state dir, and: paramd doctor"
        )


def _head(found: MeshStatus) -> str:
    step = f"step {found.step}" if found.step >= 0 else "step unknown"
    return f"job {found.job}, run {found.incarnation}, {step}"


def _health(target: Target, job: str) -> str:
    """The control plane's verdict, in the page's words: its line, then the others; "unknown" if it
    does not answer."""
    try:
        return verdict_text(_verdict_on(job, target.ask("GET", "/jobs")))
    except ParamdError as error:
        return f"health: unknown: {one_line(str(error))}"


def _verdict_on(job: str, listed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's verdict from the answer of `GET /jobs`. Raises NotFoundError."""
    one = next((one for one in listed["jobs"] if one["job"] == job), None)
    if one is None:
        raise NotFoundError(f"its control plane does not serve job {job!r}")
    return dict(one["verdict"])


def verdict_text(verdict: Mapping[str, Any]) -> str:
    """A verdict in lines: the worst first."""
    first = f"health: {verdict['word']}: {one_line(str(verdict['line']))}"
    return "\n".join([first, *(f"  also: {one_line(str(one))}" for one in verdict["more"])])


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


def _is_starting(target: Target, job: str) -> bool:
    """Whether the control plane reports that the job is starting."""
    with suppress(ParamdError):
        return bool(target.ask("GET", f"/jobs/{quote(job, safe='')}")["state"] == "starting")
    return False


def follow(
    look: Callable[[], MeshStatus],
    health: Callable[[], str],
    form: Format,
    *,
    every_s: float,
    out: TextIO | None = None,
) -> NoReturn:
    """Print the state every `every_s`, in a table with the health; a terminal is redrawn in
    place."""
    _check_streamed(form)
    out = out if out is not None else sys.stdout
    clears = out.isatty() and form.is_table
    outage = Outage()
    while True:
        began_s = time.monotonic()
        try:
            found = look()
        except ParamdError as error:
            outage.tell(error)
        else:
            text = io.StringIO()
            emit(listing(found), form, out=text, width=terminal_width(out))
            now = datetime.now().astimezone().strftime("%H:%M:%S")
            head = f"{_head(found)}, {now}\n"
            if form.is_table:
                head += f"{health()}\n"
                out.write((CLEAR if clears else "") + head)
            out.write(text.getvalue())
            out.flush()
            outage.tell(None)
        time.sleep(max(began_s + every_s - time.monotonic(), 0.05))


def listing(found: MeshStatus) -> Listing:
    """One row per rank."""
    return Listing(
        name="ranks",
        rows=[asdict(row) for row in found],
        columns=COLUMNS,
        about={"job": found.job, "incarnation": found.incarnation, "world_size": found.world_size},
        id_key="rank",
    )


ALERT_COLUMNS = (
    Column("severity", "SEVERITY"),
    Column("rule", "RULE"),
    Column("state", "STATE", drop=2),
    Column("incarnation", "RUN", right=True, if_many=True),
    Column("first_seen_s", "SINCE", when, drop=1),
    Column("last_seen_s", "LAST SEEN", when, drop=3),
    Column("reason", "REASON"),
)


@with_output
def alerts(
    target: Target,
    everything: Annotated[bool, Option("--all", help="Include resolved alerts.")] = False,
    watch: Annotated[
        bool, Option("-w", "--watch", help="Keep running; print alerts as they fire and resolve.")
    ] = False,
) -> None:
    """Show alerts: NaN, norm jumps, diverging replicas, stale or slow ranks.

    The control plane evaluates the rules, which are configured in the table
    \\[alerts] of its paramd.toml. --watch prints each alert when it fires and
    when it is resolved.
    """
    asyncio.run(
        _follow_alerts(target) if watch else _alerts(target, "all" if everything else "firing")
    )


WATCH_COLUMNS = (
    Column("what", "WHAT"),
    Column("state", "STATE"),
    Column("every_s", "EVERY", lambda s: seconds(s) if s else "-", right=True),
    Column("age_s", "LAST", lambda s: f"{seconds(s)} ago" if s is not None else "-", right=True),
    Column("turn_on", "TO TURN IT ON", drop=1),
)


class OnOff(StrEnum):
    """What `paramd watch` may be told."""

    ON = "on"
    OFF = "off"


@with_output
def watch(
    target: Target,
    turn: Annotated[
        OnOff | None, Argument(metavar="[on|off]", help="Turn it on or off; omit to see.")
    ] = None,
) -> None:
    """Show what is watched, how often and when last; turn it on or off.

    on and off apply to the sampling of parameters and gradients, until the run
    ends. Set watch in the table \\[alerts] of paramd.toml for every run.
    """
    found = asyncio.run(_watch(target, turn))
    target.show("watches", found["watches"], WATCH_COLUMNS, id_key="what")
    say(verdict_text(found))


async def _watch(target: Target, turn: OnOff | None) -> dict[str, Any]:
    """The job's verdict, after the change."""
    async with open_door(target) as door:
        if turn is not None:
            return await door.watch(on=turn is OnOff.ON)
        return await door.verdict()


async def _alerts(target: Target, state: str) -> None:
    async with open_door(target) as door:
        found = await door.alerts(state)
    _show_alerts(target, door.job, found["incarnation"], found["alerts"])
    say(f"job {door.job}, run {found['incarnation']}: {found['firing_count']} firing")
    if found["verdict"] is not None:
        say(verdict_text({**found["verdict"], "more": ()}))


async def _follow_alerts(target: Target) -> None:
    _check_streamed(target.format)
    outage = Outage()
    told: dict[str, str] = {}
    async with open_door(target) as door:
        say(f"watching job {door.job} at {door.url}; Ctrl-C to stop")
        while True:
            try:
                found = await door.alerts("all")
            except ParamdError as error:
                outage.tell(error)
            else:
                outage.tell(None)
                fresh = news(found["alerts"], told)
                if fresh:
                    _show_alerts(target, door.job, found["incarnation"], fresh)
                    # stdout may be a pipe, which is block-buffered.
                    sys.stdout.flush()
            await asyncio.sleep(ALERTS_EVERY_S)


def news(found: Sequence[Mapping[str, Any]], told: dict[str, str]) -> list[Mapping[str, Any]]:
    """Alerts that changed since `told` (updated), oldest first; at first only unresolved ones."""
    first = not told
    changed = [
        alert
        for alert in reversed(found)
        if told.get(alert["id"]) != alert["state"] and not (first and alert["state"] == "resolved")
    ]
    told.clear()
    told.update({alert["id"]: alert["state"] for alert in found})
    # Without any alert, `told` must still record that the first call is over.
    told.setdefault("", "")
    return changed


def _show_alerts(
    target: Target, job: str, incarnation: int, rows: Sequence[Mapping[str, Any]]
) -> None:
    about = {"job": job, "incarnation": incarnation}
    target.show("alerts", rows, ALERT_COLUMNS, id_key="id", **about)
    if target.format.is_table:
        for row in rows:
            if row["state"] == "firing" and (suspect := suspect_text(row)):
                say(one_line(f"{row['rule']} may come from {suspect}"))


def suspect_text(alert: Mapping[str, Any]) -> str:
    """Return the change that an alert may come from, and the command that tries its undo; empty
    when none is suspected."""
    from paramd.mesh.insight.reports import Suspect

    found = alert.get("suspect")
    if not found:
        return ""
    suspect = read_document(Suspect, found)
    return f"{suspect.text} (to try its undo: paramd undo {suspect.edit[:8]} --dry-run)"


class Status(CommandPart):
    """The jobs of this host, and the state of one."""

    name = "status"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, jobs, "", "--all")
        commands.add(LOOK, status, "", "--job my-run -o json", "-w")


class Alerts(CommandPart):
    """Alerts, and what is watched."""

    name = "alerts"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, alerts, "", "--all -o json", "-w")
        commands.add(LOOK, watch, "", "on", "off")
