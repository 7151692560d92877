"""`paramd alerts`: what is wrong with a job, now or as it happens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from paramd.cli.options import Format, Output, Target, with_target
from paramd.cli.output import Column, Listing, emit
from paramd.cli.shell import say
from paramd.cli.status import Door, Outage, open_door
from paramd.errors import ParamdError, UsageError

EVERY_S = 2.0

All = Annotated[bool, typer.Option("--all", help="Also what is over.")]
Watch = Annotated[
    bool, typer.Option("-w", "--watch", help="Go on, and write what begins and what is over.")
]


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().strftime("%m-%d %H:%M:%S")


COLUMNS = (
    Column("severity", "SEVERITY"),
    Column("rule", "RULE"),
    Column("state", "STATE"),
    Column("first_seen_s", "SINCE", _when),
    Column("last_seen_s", "LAST SEEN", _when),
    Column("reason", "REASON"),
)


@with_target
def alerts(
    target: Target, everything: All = False, watch: Watch = False, output: Output = None
) -> None:
    """Show what is wrong: NaN, norm jumps, differing replicas, stale or slow ranks.

    The control plane finds it; table [alerts] of its paramd.toml says how. With
    --watch each alert is written when it begins and when it is over.
    """
    asyncio.run(_follow(target) if watch else _once(target, "all" if everything else "firing"))


async def _once(target: Target, state: str) -> None:
    async with open_door(target.settings) as door:
        found = await door.alerts(state)
    emit(_listing(door.job, found["incarnation"], found["alerts"]), target.format)
    sampling = "" if found["watch"] else "; parameters are not sampled"
    say(
        f"job {door.job}, incarnation {found['incarnation']}: {found['firing_count']} "
        f"firing{sampling}"
    )


async def _follow(target: Target) -> None:
    form = target.format
    if form is Format.JSON:
        raise UsageError("--output: json has one end, which --watch has not; give -o jsonl")
    outage = Outage()
    told: dict[str, str] = {}
    async with open_door(target.settings) as door:
        say(f"follows job {door.job} at {door.url}; Ctrl-C ends it")
        while True:
            try:
                found = await door.alerts("all")
            except ParamdError as error:
                _say(outage.news(error))
            else:
                _say(outage.news(None))
                _write(door, found["incarnation"], news(found["alerts"], told), form)
            await asyncio.sleep(EVERY_S)


def news(found: Sequence[Mapping[str, Any]], told: dict[str, str]) -> list[Mapping[str, Any]]:
    """Alerts whose state was not told yet, the oldest first; what was over before is old."""
    first = not told
    changed = [
        alert
        for alert in reversed(found)
        if told.get(alert["id"]) != alert["state"] and not (first and alert["state"] == "resolved")
    ]
    told.clear()
    told.update({alert["id"]: alert["state"] for alert in found})
    # An empty mesh has been looked at, too.
    told.setdefault("", "")
    return changed


def _write(door: Door, incarnation: int, rows: Sequence[Mapping[str, Any]], form: Format) -> None:
    if rows:
        emit(_listing(door.job, incarnation, rows), form)
        # A pipe's reader waits for it.
        sys.stdout.flush()


def _say(text: str) -> None:
    if text:
        say(text)


def _listing(job: str, incarnation: int, rows: Sequence[Mapping[str, Any]]) -> Listing:
    return Listing(
        name="alerts",
        rows=rows,
        columns=COLUMNS,
        about={"job": job, "incarnation": incarnation},
        id_key="id",
    )
