"""`paramd logs`: the last lines of a rank's sidecar and trainer, of ended jobs too."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from paramd import state_files
from paramd.cli import completion, ended
from paramd.cli.options import Output, Target, with_target
from paramd.cli.output import Column, Listing, emit
from paramd.cli.shell import one_line

if TYPE_CHECKING:
    from paramd.mesh.insight.reports import RankLog

COLUMNS = (
    Column("source", "SOURCE"),
    Column("lines", "LINES", lambda lines: str(len(lines)), right=True),
)


@with_target
def logs(
    target: Target,
    rank: Annotated[
        int,
        typer.Argument(
            metavar="RANK", min=0, help="Rank to show.", autocompletion=completion.ranks
        ),
    ],
    lines: Annotated[
        int,
        typer.Option(
            "-n",
            "--lines",
            min=1,
            max=state_files.MAX_LOG_LINES,
            help="Most last lines of each log.",
        ),
    ] = 100,
    output: Output = None,
) -> None:
    """Show the last lines of a rank's sidecar, and of its trainer.

    The trainer's lines are available if its output goes to a file (torchrun
    --log-dir DIR --redirects 3), also after it has died, until its sidecar
    exits. For a job that has ended, the sidecar's log is read from this host's
    state dir. Needs an editor's or an admin's token.
    """
    past = ended.find(target)
    if past is not None:
        past.say()
        found = _left(past, rank, lines)
    else:
        with target.connect() as mesh:
            found = mesh.logs(rank, lines=lines)
    if target.format.is_table:
        for line in found.text():
            print(one_line(line))
        return
    rows = [asdict(one) for one in found.logs]
    about = {
        "job": found.job,
        "incarnation": found.incarnation,
        "rank": found.rank,
        "error": found.error,
    }
    listing = Listing(name="logs", rows=rows, columns=COLUMNS, about=about, id_key="source")
    emit(listing, target.format)


def _left(past: ended.Past, rank: int, lines: int) -> RankLog:
    """What an ended job's sidecars have left here."""
    from paramd.mesh.insight.reports import LogTail, RankLog

    found = state_files.lines_of_log(past.job, rank, lines)
    tail = LogTail(
        source="sidecar",
        lines=tuple(found),
        missing="" if found else "nothing has been written to it",
    )
    return RankLog(
        job=past.job, incarnation=past.last.incarnation, rank=rank, error="", logs=(tail,)
    )
