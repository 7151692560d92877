"""`paramd diff`: how two states of the weights differ."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli.options import Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, number
from paramd.cli.shell import say
from paramd.errors import UsageError

if TYPE_CHECKING:
    from paramd.mesh.mesh import Mesh


def _rows(value: Any) -> str:
    return ", ".join(str(row) for row, _ in value)


COLUMNS = (
    Column("name", "NAME"),
    Column("norm", "NORM", number, right=True),
    Column("relative", "RELATIVE", number, right=True),
    Column("cosine", "COSINE", number, right=True, drop=1),
    Column("changed", "CHANGED", count, right=True),
    Column("numel", "ELEMENTS", count, right=True, drop=3),
    Column("largest_rows", "LARGEST ROWS", _rows, drop=2),
    Column("problem", "PROBLEM"),
)


@with_target
def diff(
    target: Target,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="'now', '+N' (N steps from now), a step to come, mark:NAME, job:NAME, or a "
            "safetensors file or directory.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same.")] = "now",
    only: Annotated[
        list[str] | None, typer.Option("--filter", metavar="GLOB", help="Compare these names.")
    ] = None,
    output: Output = None,
) -> None:
    """Show how the weights of B differ from those of A, tensor by tensor.

    Norm and cosine of the difference, changed elements, and the rows that differ
    most; the largest relative difference comes first.
    """
    with ExitStack() as stack:
        mesh = stack.enter_context(target.connect())
        one, other = (_source(stack, target, text) for text in (a, b))
        found = mesh.diff(one, other, *(only or ()))
    rows = [asdict(row) for row in found]
    emit(
        Listing(name="tensors", rows=rows, columns=COLUMNS, about={"a": found.a, "b": found.b}),
        target.format,
    )
    say(found.summary())


def _source(stack: ExitStack, target: Target, text: str) -> str | int | Mesh:
    if text.startswith("job:"):
        return stack.enter_context(target.named(text.removeprefix("job:")).connect())
    if text.startswith("+") and not text[1:].isdecimal():
        raise UsageError(f"{text[:40]!r}: expected +N, the steps from now")
    return int(text) if text.isdecimal() else text
