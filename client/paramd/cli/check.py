"""`paramd check`: whether a rank's updates are what their arithmetic makes of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from paramd.cli.options import AnyGlobs, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit
from paramd.cli.shell import say

COLUMNS = (
    Column("name", "NAME"),
    Column("key", "STATE"),
    Column("numel", "ELEMENTS", count, right=True, drop=2),
    Column("differing", "DIFFERING", count, right=True),
    Column("element", "FIRST", right=True, drop=1),
    Column("bits", "BITS", lambda bits: ", ".join(map(str, bits))),
    Column("refused", "NOT MADE AGAIN"),
)


@with_target
def check(
    target: Target,
    glob: AnyGlobs = None,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Whose update.")] = 0,
    count_: Annotated[int, typer.Option("-n", "--count", min=1, help="Check so many updates.")] = 1,
    output: Output = None,
) -> None:
    """Recompute the next update of a rank, and compare the results bit by bit.

    The rank's sidecar recomputes the update from gradients, parameters and
    optimizer state, with torch's own Adam, AdamW or SGD. Exits with code 1 if
    anything differs.
    """
    rows, wrong = [], False
    with target.connect() as mesh:
        for _ in range(count_):
            found = mesh.replay(*(glob or ()), rank=rank)
            rows += [{"step": found.step, **asdict(row)} for row in found]
            wrong = wrong or not found.clean
            say(found.summary())
    about = {"job": found.job, "incarnation": found.incarnation, "rank": rank}
    emit(Listing(name="tensors", rows=rows, columns=COLUMNS, about=about), target.format)
    if wrong:
        raise typer.Exit(1)
