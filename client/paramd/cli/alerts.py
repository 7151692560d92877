"""`paramd alerts`: list a job's alerts, or follow them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from paramd.cli.options import Format, Output, Target, with_target
from paramd.cli.output import Column, Listing, emit, when
from paramd.cli.shell import say
from paramd.cli.status import Door, Outage, open_door
from paramd.errors import ParamdError, UsageError

EVERY_S = 2.0

All = Annotated[bool, typer.Option("--all", help="Include resolved alerts.")]
Watch = Annotated[
    bool, typer.Option("-w", "--watch", help="Keep running; print alerts as they fire and resolve.")
]


COLUMNS = (
    Column("severity", "SEVERITY"),
    Column("rule", "RULE"),
    Column("state", "STATE", drop=2),
    Column("incarnation", "INC", right=True, if_many=True),
    Column("first_seen_s", "SINCE", when, drop=1),
    Column("last_seen_s", "LAST SEEN", when, drop=3),
    Column("reason", "REASON"),
)


@with_target
def alerts(
    target: Target, everything: All = False, watch: Watch = False, output: Output = None
) -> None:
    """Show alerts: NaN, norm jumps, diverging replicas, stale or slow ranks.

    The control plane evaluates the rules, which are configured in the table
    \\[alerts] of its paramd.toml. --watch prints each alert when it fires and
    when it is resolved.
    """
    asyncio.run(_follow(target) if watch else _once(target, "all" if everything else "firing"))


async def _once(target: Target, state: str) -> None:
    async with open_door(target) as door:
        found = await door.alerts(state)
    emit(_listing(door.job, found["incarnation"], found["alerts"]), target.format)
    sampling = "" if found["watch"] else "; parameters are not being sampled"
    say(
        f"job {door.job}, incarnation {found['incarnation']}: {found['firing_count']} "
        f"firing{sampling}"
    )


async def _follow(target: Target) -> None:
    form = target.format
    if form is Format.JSON:
        raise UsageError("--output: json cannot be streamed; use -o jsonl with --watch")
    outage = Outage()
    told: dict[str, str] = {}
    async with open_door(target) as door:
        say(f"watching job {door.job} at {door.url}; Ctrl-C to stop")
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
    """Alerts whose state changed since `told`, oldest first; updates `told`.

    The first call skips those already resolved.
    """
    first = not told
    changed = [
        alert
        for alert in reversed(found)
        if told.get(alert["id"]) != alert["state"] and not (first and alert["state"] == "resolved")
    ]
    told.clear()
    told.update({alert["id"]: alert["state"] for alert in found})
    # Without any alert, `told` must still say that the first call is over.
    told.setdefault("", "")
    return changed


def _write(door: Door, incarnation: int, rows: Sequence[Mapping[str, Any]], form: Format) -> None:
    if rows:
        emit(_listing(door.job, incarnation, rows), form)
        # stdout may be a pipe, which is block-buffered.
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
