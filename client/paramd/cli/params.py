"""`paramd params`: what there is to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paramd.cli.options import Buffers, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, shape
from paramd.cli.shell import say

if TYPE_CHECKING:
    from paramd.mesh.results import ParamInfo

COLUMNS = (
    Column("fqn", "NAME"),
    Column("shape", "SHAPE", shape, right=True),
    Column("dtype", "DTYPE"),
    Column("numel", "ELEMENTS", count, right=True),
    Column("placement", "PLACEMENT"),
    Column("aliases", "TIED TO", ", ".join),
)


@with_target
def params(
    target: Target,
    glob: Annotated[
        list[str] | None, typer.Argument(metavar="GLOB", help="Which names; all by default.")
    ] = None,
    buffers: Buffers = False,
    output: Output = None,
) -> None:
    """List parameters: full shape, dtype and how they are distributed."""
    with target.connect() as mesh:
        found = mesh.params(*(glob or ()), buffers=buffers)
        about = {"job": mesh.job, "epoch": mesh.epoch}
    rows = [row(info) for info in found]
    emit(Listing(name="params", rows=rows, columns=COLUMNS, about=about), target.format)
    say(f"{len(rows):,} tensors, {sum(info.numel for info in found):,} elements")


def row(info: ParamInfo) -> dict[str, object]:
    """What is shown of one tensor."""
    return {
        "fqn": info.fqn,
        "shape": list(info.shape),
        "dtype": info.dtype,
        "numel": info.numel,
        "placement": info.placement,
        "kind": info.kind.value,
        "aliases": [name for name in info.names if name != info.fqn],
        "ranks": list(info.ranks),
    }
