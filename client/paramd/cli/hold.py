"""`paramd pause`, `step` and `resume`: hold training at a boundary, the same on all ranks."""

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
    float, typer.Option("--timeout", metavar="S", help="Seconds to wait for all ranks to agree.")
]


@with_target
def pause(
    target: Target,
    lease_s: Annotated[
        float,
        typer.Option("--lease", metavar="S", help="Seconds until training resumes by itself."),
    ] = 30.0,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Renew the lease until Ctrl-C, for at most 5 minutes."),
    ] = False,
    timeout: Timeout = 60.0,
    output: Output = None,
) -> None:
    """Pause training on all ranks, at the same boundary.

    The hold ends with `paramd resume` or when its lease expires; with --keep,
    when this command exits.
    """
    with target.connect() as mesh:
        found = mesh.pause(lease_s=lease_s, renew=keep, timeout=timeout)
        _emit(mesh.job, found, target.format)
        if not keep:
            return
        say("training is paused; Ctrl-C resumes it")
        try:
            while mesh.hold_state().state != "running":
                time.sleep(LOOK_S)
            say("the hold has ended")
        except KeyboardInterrupt:
            mesh.resume(timeout=timeout)
            say("training resumed")


@with_target
def step(
    target: Target,
    steps: Annotated[int, typer.Argument(metavar="[N]", help="Number of updates to run.")] = 1,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the updates are finished.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds to wait for them.")
    ] = 60.0,
    output: Output = None,
) -> None:
    """Run a few updates of a paused training, then pause it again."""
    with target.connect() as mesh:
        _emit(mesh.job, mesh.step(steps, wait=wait, timeout=timeout), target.format)


@with_target
def resume(target: Target, timeout: Timeout = 60.0, output: Output = None) -> None:
    """Resume a paused training."""
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
