"""`paramd restore`: an export back into the running mesh."""

from __future__ import annotations

from typing import Annotated

import typer

from paramd.cli.edits import emit_edit
from paramd.cli.options import Output, Target, with_target
from paramd.cli.progress import bar


@with_target
def restore(
    target: Target,
    destination: Annotated[
        str, typer.Argument(metavar="DEST/KEY", help="An export of safetensors.")
    ],
    if_step: Annotated[
        int | None, typer.Option("--if-step", metavar="N", help="Refuse at any other step.")
    ] = None,
    reset_moments: Annotated[
        bool, typer.Option("--reset-moments", help="Zero the optimizer's state, too.")
    ] = False,
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help="Why.")] = None,
    output: Output = None,
) -> None:
    """Write the parameters of an export back into the running training, as one edit.

    On all ranks at one step, or on none. Buffers and the optimizer's state stay as they are.
    paramd undo takes it back.
    """
    with target.connect() as mesh, bar(destination) as moved:
        found = mesh.restore(
            destination,
            if_step=if_step,
            reset_moments=reset_moments,
            note=note,
            moved=lambda done_bytes, size_bytes: moved(destination, done_bytes, size_bytes),
        )
    emit_edit(found, target.format)
