"""`paramd edits` and `paramd undo`: what was changed, by whom, and taking it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli.options import Format, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, number, size
from paramd.cli.shell import say

if TYPE_CHECKING:
    from paramd.mesh.editing.results import Edit


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().strftime("%m-%d %H:%M:%S")


COLUMNS = (
    Column("id", "ID", lambda found: found[:8]),
    Column("state", "STATE"),
    Column("step", "STEP", lambda found: count(found) if found >= 0 else "", right=True),
    Column("what", "WHAT"),
    Column("size_bytes", "SIZE", size, right=True),
    Column("stop_ms", "STOP MS", number, right=True),
    Column("created_s", "WHEN", _when),
    Column("actor", "WHO"),
    Column("note", "NOTE"),
    Column("why", "REASON"),
)

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Until it is applied, or refused.")]


@with_target
def edits(
    target: Target,
    edit_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One edit, with all that is known of it.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option("--state", metavar="STATE", help="Only those, for example APPLIED."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="At most so many.")] = 50,
    output: Output = None,
) -> None:
    """List the edits of a job, the newest first; with an ID, show one."""
    with target.connect() as mesh:
        if edit_id is not None:
            emit_edit(mesh.get_edit(edit_id), target.format)
            return
        found = mesh.edits(state=state.upper() if state is not None else None, limit=limit)
        about = {"job": mesh.job, "epoch": mesh.epoch}
    emit(_listing([_row(edit) for edit in found], about), target.format)


@with_target
def undo(
    target: Target,
    edit_id: Annotated[str, typer.Argument(metavar="ID", help="Which edit; 8 characters suffice.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also when later edits changed some of the same.")
    ] = False,
    wait: Wait = True,
    output: Output = None,
) -> None:
    """Undo an edit: what was added is subtracted, all else is put back as it was.

    Updates of the training since then are lost where values are put back.
    """
    with target.connect() as mesh:
        found = mesh.undo(edit_id, force=force, wait=wait)
    emit_edit(found, target.format)


def emit_edit(edit: Edit, form: Format) -> None:
    """One edit to stdout, and before and after to stderr when a person reads."""
    row = _row(edit)
    if form in (Format.JSON, Format.JSONL):
        row = {**row, "ops": [dict(op) for op in edit.ops], "reason": edit.reason}
        row |= {"before": _numbers(edit.before), "after": _numbers(edit.after)}
        row |= {"undo_of": edit.undo_of, "undone_by": edit.undone_by, "epoch": edit.epoch}
        row |= {"undoable": edit.undoable, "undo_refusal": edit.undo_refusal}
    emit(_listing([row], {"job": edit.job}), form)
    if form is Format.TABLE and edit.before is not None and edit.after is not None:
        for when, found in (("before", edit.before), ("after", edit.after)):
            say(
                f"{when}: min {found.min:.4g}, max {found.max:.4g}, mean {found.mean:.4g}, "
                f"norm {found.norm:.4g}, {found.nan_count:,} NaN, {found.inf_count:,} Inf"
            )


def _listing(rows: list[dict[str, Any]], about: Mapping[str, Any]) -> Listing:
    return Listing(name="edits", rows=rows, columns=COLUMNS, about=about, id_key="id")


def _row(edit: Edit) -> dict[str, Any]:
    from paramd.mesh.editing.results import what_text

    return {
        "id": edit.id,
        "state": str(edit.state),
        "step": edit.step,
        "what": what_text(edit),
        "names": list(edit.names),
        "size_bytes": edit.size_bytes,
        "stop_ms": edit.stop_ms,
        "created_s": edit.created_s,
        "actor": edit.actor,
        "note": edit.note,
        "why": edit.reason or (f"undone by {edit.undone_by[:8]}" if edit.undone_by else ""),
    }


def _numbers(found: Any) -> dict[str, Any] | None:
    return asdict(found) if found is not None else None
