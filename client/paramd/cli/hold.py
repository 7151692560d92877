"""`paramd pause`, `step` and `resume`: training waits at a boundary, on all ranks alike."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from paramd.cli.options import Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, seconds
from paramd.cli.shell import say

if TYPE_CHECKING:
    from paramd.cli.options import Format
    from paramd.mesh.edits.calls import Hold

LOOK_S = 1.0

COLUMNS = (
    Column("state", "STATE"),
    Column("step", "STEP", count, right=True),
    Column("steps_left", "STEPS LEFT", count, right=True),
    Column("lease_left_s", "LEASE LEFT", seconds, right=True),
    Column("holder", "HOLDER"),
)

Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", help="Seconds until all ranks have agreed.")
]


@with_target
def pause(
    target: Target,
    lease_s: Annotated[
        float,
        typer.Option("--lease", metavar="S", help="Training goes on by itself after that."),
    ] = 30.0,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Renew the lease until Ctrl-C, for 5 minutes at most."),
    ] = False,
    timeout: Timeout = 60.0,
    output: Output = None,
) -> None:
    """Have all ranks wait at their next common boundary.

    The hold ends by `paramd resume`, or by itself when its lease ends; with --keep
    when this program ends.
    """
    with target.connect() as mesh:
        found = mesh.pause(lease_s=lease_s, renew=keep, timeout=timeout)
        _emit(mesh.job, found, target.format)
        if not keep:
            return
        say("training waits; Ctrl-C lets it go on")
        try:
            while mesh.hold_state().state != "running":
                time.sleep(LOOK_S)
            say("the hold has ended")
        except KeyboardInterrupt:
            mesh.resume(timeout=timeout)
            say("training goes on")


@with_target
def step(
    target: Target,
    steps: Annotated[int, typer.Argument(metavar="[N]", help="Updates to let pass.")] = 1,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until the updates are finished.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds until they are finished.")
    ] = 60.0,
    output: Output = None,
) -> None:
    """Let held training finish some updates, then wait again."""
    with target.connect() as mesh:
        _emit(mesh.job, mesh.step(steps, wait=wait, timeout=timeout), target.format)


@with_target
def resume(target: Target, timeout: Timeout = 60.0, output: Output = None) -> None:
    """Let held training go on."""
    with target.connect() as mesh:
        _emit(mesh.job, mesh.resume(timeout=timeout), target.format)


def _emit(job: str, hold: Hold, form: Format) -> None:
    row = {
        "state": hold.state,
        "step": hold.step,
        "steps_left": hold.steps_left,
        "lease_left_s": hold.lease_left_s,
        "holder": hold.holder,
    }
    emit(
        Listing(name="hold", rows=[row], columns=COLUMNS, about={"job": job}, id_key="state"), form
    )
