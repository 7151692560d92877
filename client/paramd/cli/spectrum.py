"""`paramd spectrum`: singular values of a weight, and its dead and equal rows."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from paramd.cli import completion
from paramd.cli.options import Output, Target, with_target
from paramd.cli.output import Column, Listing, emit, number
from paramd.cli.shell import say
from paramd.extras import need

if TYPE_CHECKING:
    from paramd.mesh.insight.spectrum import Spectrum

COLUMNS = (
    Column("number", "NUMBER", right=True),
    Column("value", "SINGULAR VALUE", number, right=True),
    Column("share", "OF THE SQUARED NORM", lambda value: f"{100 * value:.2f} %", right=True),
)


@with_target
def spectrum(
    target: Target,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A weight.", autocompletion=completion.names),
    ],
    k: Annotated[int, typer.Option("-k", min=1, max=32, help="How many singular values.")] = 8,
    output: Output = None,
) -> None:
    """Show the largest singular values of a weight, and its dead and equal rows.

    The sidecars multiply their shards with narrow random matrices; the weight
    itself is not sent.
    """
    need("paramd spectrum", "torch")
    with target.connect() as mesh:
        found = mesh.spectrum(name, k)
    squares = found.norm**2
    rows = [
        {"number": number, "value": value, "share": value**2 / squares if squares else 0.0}
        for number, value in enumerate(found.singular_values)
    ]
    about = asdict(found)
    emit(Listing(name="values", rows=rows, columns=COLUMNS, about=about), target.format)
    for line in (found.summary(), *_remarks(found)):
        say(line)


def _remarks(found: Spectrum) -> list[str]:
    """What is unusual about it."""
    from paramd.mesh.insight.spectrum import listed

    lines = []
    if found.dead_row_count:
        lines.append(f"dead rows: {listed(found.dead_rows, found.dead_row_count)}")
    if found.dead_column_count:
        lines.append(f"dead columns: {listed(found.dead_columns, found.dead_column_count)}")
    if found.duplicate_row_count:
        groups = "; ".join(" = ".join(map(str, rows[:4])) for rows in found.duplicate_rows[:4])
        lines.append(f"rows equal to an earlier one: {found.duplicate_row_count:,} ({groups})")
    for share, what in ((found.saturated, "saturated"), (found.denormal, "denormal")):
        if share:
            lines.append(f"{what} elements: {100 * share:.3g} %")
    return lines
