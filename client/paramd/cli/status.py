"""`paramd status`: what every rank is doing."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from paramd.cli.options import Format, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, seconds, size
from paramd.cli.shell import say
from paramd.cli.watching import Outage
from paramd.errors import ParamdError, PartialError, UsageError

if TYPE_CHECKING:
    from paramd.mesh.results import MeshStatus

CLEAR = "\033[H\033[2J"

Watch = Annotated[bool, typer.Option("-w", "--watch", help="Go on until Ctrl-C.")]
Every = Annotated[
    float, typer.Option("--every", min=0.2, max=3600.0, help="Seconds between two looks.")
]

COLUMNS = (
    Column("rank", "RANK", right=True),
    Column("phase", "PHASE"),
    Column("step", "STEP", lambda step: count(step) if step >= 0 else "-", right=True),
    Column("step_time_s", "STEP TIME", lambda s: seconds(s) if s else "-", right=True),
    Column("stall_count", "STALLS", count, right=True),
    Column("stall_total_s", "STALLED", seconds, right=True),
    Column("arena_bytes", "ARENA", size, right=True),
    Column("snapshot_bytes", "SNAPSHOTS", size, right=True),
    Column("reason", "NOTE"),
)


@with_target
def status(target: Target, watch: Watch = False, every: Every = 2.0, output: Output = None) -> None:
    """Show what every rank of a job is doing.

    STALLS counts the updates that waited for a copy, STALLED is the time they
    waited. Exit code 6 when a rank does not answer or cannot be served. With
    --watch it goes on until Ctrl-C, whatever it finds.
    """
    with target.connect() as mesh:
        if watch:
            follow(mesh.status, target.format, every_s=every)
        found = mesh.status()
    emit(listing(found), target.format)
    say(f"job {found.job}, epoch {found.epoch}, step {found.step}")
    # Held on request is well.
    bad = [row.rank for row in found if row.reason and row.phase != "held"]
    if bad or len(found) < found.world_size:
        raise PartialError(
            f"{len(found) - len(bad)} of {found.world_size} ranks are well; see NOTE, the "
            "sidecars' logs in the state dir, and: paramd doctor"
        )


def follow(
    look: Callable[[], MeshStatus], form: Format, *, every_s: float, out: TextIO | None = None
) -> NoReturn:
    """Writes the state again and again; on a terminal at the same place."""
    if form is Format.JSON:
        raise UsageError("--output: json has one end, which --watch has not; give -o jsonl")
    out = out if out is not None else sys.stdout
    clears = out.isatty() and form is Format.TABLE
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
            emit(listing(found), form, out=text)
            head = f"job {found.job}, epoch {found.epoch}, step {found.step}, {_now()}\n"
            out.write((CLEAR if clears else "") + (head if form is Format.TABLE else ""))
            out.write(text.getvalue())
            out.flush()
        if said:
            say(said)
        time.sleep(max(began_s + every_s - time.monotonic(), 0.05))


def _now() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")


def listing(found: MeshStatus) -> Listing:
    """The answer as rows."""
    return Listing(
        name="ranks",
        rows=[asdict(row) for row in found],
        columns=COLUMNS,
        about={"job": found.job, "epoch": found.epoch, "world_size": found.world_size},
        id_key="rank",
    )
