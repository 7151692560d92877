"""`paramd updates`: what the next update does to each parameter."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from paramd.cli.options import AnyGlobs, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, number
from paramd.cli.shell import say

COLUMNS = (
    Column("name", "NAME"),
    Column("step", "STEP", right=True, if_many=True),
    Column("norm", "NORM", number, right=True),
    Column("weight_norm", "WEIGHT", number, right=True, drop=1),
    Column("ratio", "RATIO", number, right=True),
    Column("rms", "RMS", number, right=True, drop=2),
    Column("max_abs", "MAX", number, right=True, drop=3),
    Column("changed", "CHANGED", count, right=True, drop=4),
    Column("numel", "ELEMENTS", count, right=True, drop=5),
    Column("moment_rms", "V RMS", number, right=True, drop=2),
    Column("effective_lr", "EFFECTIVE LR", number, right=True, drop=1),
    Column("nonfinite", "NAN/INF", count, right=True, drop=6),
)


@with_target
def updates(
    target: Target,
    glob: AnyGlobs = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="So many updates together.")] = 1,
    output: Output = None,
) -> None:
    """Show what the next update does: its norm, and its ratio to the weight.

    The sidecars compute it from snapshots of two steps; training continues. A
    rising ratio, or a rising effective learning rate, often precedes a jump of
    the loss.
    """
    with target.connect() as mesh:
        found = mesh.updates(*(glob or ()), steps=steps)
    rows = [asdict(row) for row in found]
    about = {
        "job": found.job,
        "incarnation": found.incarnation,
        "moments_missing": found.moments_missing,
    }
    emit(Listing(name="updates", rows=rows, columns=COLUMNS, about=about), target.format)
    say(found.summary())
    if found.moments_missing:
        say(f"no second moments: {found.moments_missing}")
