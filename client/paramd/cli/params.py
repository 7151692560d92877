"""`paramd params`: list parameters and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli import completion
from paramd.cli.options import Buffers, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, shape
from paramd.cli.shell import say
from paramd.filters import Facts, parse_filter

if TYPE_CHECKING:
    from paramd.mesh.results import ParamInfo


def _flag(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, "-")


COLUMNS = (
    Column("name", "NAME"),
    Column("shape", "SHAPE", shape, right=True),
    Column("dtype", "DTYPE", drop=2),
    Column("numel", "ELEMENTS", count, right=True, drop=1),
    Column("placement", "PLACEMENT"),
    Column("trainable", "TRAINABLE", _flag, drop=4),
    Column("aliases", "TIED TO", ", ".join, drop=3),
)


@with_target
def params(
    target: Target,
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILTER",
            autocompletion=completion.names,
            help="Name patterns, and terms that must all hold, such as 'numel>1M' "
            "'dtype=bfloat16' 'shape=4096x*' 'norm>10' 'nan>0'. Default: everything.",
        ),
    ] = None,
    buffers: Buffers = False,
    trainable: Annotated[
        bool | None,
        typer.Option(
            "--trainable/--frozen",
            help="Only parameters that did, or did not, require a gradient at attach.",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
) -> None:
    """List parameters: full shape, dtype and how they are distributed.

    Terms compare name, placement, kind, dtype, shape, numel, dims, rank, tied
    and trainable. Terms on norm, mean, std, min, max, absmax, nan, inf and
    zero first compute statistics of all tensors that match the other terms.
    """
    chosen = parse_filter(" ".join(wanted if wanted is not None else ()))
    with target.connect() as mesh:
        found = [
            info
            for info in mesh.params(*chosen.patterns, buffers=buffers, trainable=trainable)
            if chosen.matches(facts_of(info))
        ]
        about: dict[str, object] = {"job": mesh.job, "incarnation": mesh.incarnation}
        if chosen.statistics and found:
            stats = mesh.stats(*(info.name for info in found), buffers=buffers)
            about |= {"incarnation": stats.incarnation, "step": stats.step}
            pairs = zip(found, stats, strict=True)
            found = [info for info, one in pairs if chosen.matches_numbers(one.summary)]
    rows = [row(info) for info in found]
    emit(Listing(name="params", rows=rows, columns=COLUMNS, about=about), target.format)
    say(f"{len(rows):,} tensors, {sum(info.numel for info in found):,} elements")


def facts_of(info: ParamInfo) -> Facts:
    """The facts that filters compare."""
    return Facts(tensor=info, kind=info.kind.value, names=info.names, ranks=frozenset(info.ranks))


def row(info: ParamInfo) -> dict[str, object]:
    """One tensor's row."""
    return {
        "name": info.name,
        "shape": list(info.shape),
        "dtype": info.dtype,
        "numel": info.numel,
        "placement": info.placement,
        "kind": info.kind.value,
        "trainable": info.trainable,
        "aliases": [name for name in info.names if name != info.name],
        "ranks": list(info.ranks),
    }
