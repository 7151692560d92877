"""`paramd edit`, `edits`, `undo`: change parameters of a running job, on all ranks or none."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd import extras
from paramd.cli import completion, ended
from paramd.cli.ended import Past
from paramd.cli.options import Format, Globs, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, number, size, when
from paramd.cli.shell import say
from paramd.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    import torch

    from paramd.mesh.edits.calls import Edit
    from paramd.mesh.edits.editing import Progress
    from paramd.mesh.mesh import Mesh

Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until it is applied or refused.")
]

PANEL = "Operation (exactly one)"

Fill = Annotated[
    float | None,
    typer.Option("--fill", metavar="X", help="Set to a number.", rich_help_panel=PANEL),
]
Mul = Annotated[
    float | None,
    typer.Option("--mul", metavar="X", help="Multiply by a number.", rich_help_panel=PANEL),
]
Add = Annotated[
    float | None, typer.Option("--add", metavar="X", help="Add a number.", rich_help_panel=PANEL)
]
Clamp = Annotated[
    str | None,
    typer.Option(
        "--clamp", metavar="MIN:MAX", help="Clamp; either bound may be omitted.",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
From = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FILE.safetensors", rich_help_panel=PANEL,
        help="Set to the file's tensors of the same names.",
    ),
]  # fmt: skip
Lerp = Annotated[
    float | None,
    typer.Option("--lerp", metavar="W", help="With --from: interpolate, x + W * (file - x)."),
]
IfStep = Annotated[
    int | None,
    typer.Option("--if-step", metavar="N", help="Apply only at this step; pause training first."),
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="S", help="Seconds to wait.")]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="Reason, kept with the edit.")]


COLUMNS = (
    Column("id", "ID", lambda found: found[:8]),
    Column("incarnation", "INC", right=True, if_many=True),
    Column("state", "STATE"),
    Column("step", "STEP", lambda found: count(found) if found >= 0 else "", right=True),
    Column("what", "WHAT"),
    Column("size_bytes", "SIZE", size, right=True, drop=4),
    Column("stop_ms", "STOP MS", number, right=True, drop=5),
    Column("created_s", "WHEN", when, drop=2),
    Column("actor", "WHO", drop=3),
    Column("note", "NOTE", drop=1),
    Column("why", "REASON"),
)


@with_target
def edits(
    target: Target,
    edit_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="Show one edit in full.", autocompletion=completion.edit_ids
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option("--state", metavar="STATE", help="Only edits in this state, e.g. APPLIED."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="List at most N.")] = 50,
    output: Output = None,
) -> None:
    """List the edits of a job, newest first; with an ID, show one.

    Of a job that has ended too, from what is stored on this host.
    """
    past = ended.find(target)
    if past is not None:
        _emit_past(past, edit_id, state, limit, target.format)
        return
    with target.connect() as mesh:
        if edit_id is not None:
            emit_edit(mesh.get_edit(edit_id), target.format)
            return
        found = mesh.edits(state=state.upper() if state is not None else None, limit=limit)
        about = {"job": mesh.job, "incarnation": mesh.incarnation}
    emit(_listing([_row(edit) for edit in found], about), target.format)


def _emit_past(
    past: Past, edit_id: str | None, state: str | None, limit: int, form: Format
) -> None:
    from paramd.mesh.edits.calls import parse_edit

    wanted = state.upper() if state is not None else None
    found = [parse_edit(one) for one in past.edits(id=edit_id, state=wanted, limit=max(limit, 2))]
    past.say()
    if edit_id is None:
        about = {"job": past.job, "incarnation": past.last.incarnation}
        emit(_listing([_row(edit) for edit in found[:limit]], about), form)
    elif len(found) == 1:
        emit_edit(found[0], form)
    elif found:
        raise UsageError(f"more than one edit's id begins with {edit_id!r}; give more characters")
    else:
        raise NotFoundError(f"no edit of job {past.job!r} has an id that begins {edit_id[:40]!r}")


@with_target
def undo(
    target: Target,
    edit_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The edit's ID, or its first 8 characters.",
            autocompletion=completion.edit_ids,
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Undo even if later edits changed the same elements.")
    ] = False,
    wait: Wait = True,
    output: Output = None,
) -> None:
    """Undo an edit: an addition is subtracted again, anything else restores the old values.

    Restored values lose the training updates made since the edit.
    """
    with target.connect() as mesh, _told_if_interrupted():
        found = mesh.undo(edit_id, force=force, wait=wait)
    emit_edit(found, target.format)


@contextmanager
def _told_if_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say(
            "interrupted; if the edit was committed already it is applied all the same. To see it: "
            "paramd edits"
        )
        raise


def emit_edit(edit: Edit, form: Format) -> None:
    """Print one edit to stdout; with a table, also before and after to stderr."""
    row = _row(edit)
    if form in (Format.JSON, Format.JSONL):
        row = {**row, "ops": [dict(op) for op in edit.ops], "reason": edit.reason}
        row |= {"before": _numbers(edit.before), "after": _numbers(edit.after)}
        row |= {
            "committed_by": edit.committed_by,
            "undo_of": edit.undo_of,
            "undone_by": edit.undone_by,
        }
        row |= {"undoable": edit.undoable, "undo_refusal": edit.undo_refusal}
        row |= {
            "rollback": edit.rollback,
            "hyperparameters": edit.hyperparameters,
            "warning": edit.warning,
        }
    emit(_listing([row], {"job": edit.job}), form)
    if form.is_table and edit.before is not None and edit.after is not None:
        for moment, found in (("before", edit.before), ("after", edit.after)):
            say(
                f"{moment}: min {found.min:.4g}, max {found.max:.4g}, mean {found.mean:.4g}, "
                f"norm {found.norm:.4g}, {found.nan_count:,} NaN, {found.inf_count:,} Inf"
            )


def _listing(rows: list[dict[str, Any]], about: Mapping[str, Any]) -> Listing:
    return Listing(name="edits", rows=rows, columns=COLUMNS, about=about, id_key="id")


def _row(edit: Edit) -> dict[str, Any]:
    from paramd.mesh.edits.calls import what_text

    return {
        "id": edit.id,
        "incarnation": edit.incarnation,
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


@with_target
def edit(
    target: Target,
    glob: Globs,
    fill: Fill = None,
    mul: Mul = None,
    add: Add = None,
    clamp: Clamp = None,
    from_file: From = None,
    lerp: Lerp = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show the effect.")
    ] = False,
    if_step: IfStep = None,
    reset_moments: Annotated[
        bool,
        typer.Option("--reset-moments", help="Zero the optimizer state of the changed elements."),
    ] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Allow NaN and infinities (admins only).")
    ] = False,
    note: Note = "",
    wait: Wait = True,
    timeout: Timeout = 60.0,
    output: Output = None,
) -> None:
    """Change parameters of the running job, on all ranks at one step or on none.

    Training continues, and its next update starts from the changed values.
    `paramd undo` reverts the edit while the sidecars still keep its undo data.
    """
    numbers = {"fill": fill, "mul": mul, "add": add, "clamp": _bounds(clamp)}
    form: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if len(form) + (from_file is not None) != 1:
        options = ", ".join(f"--{name}" for name in numbers)
        raise UsageError(f"edit: give exactly one of {options}, --from")
    if lerp is not None and from_file is None:
        raise UsageError("--lerp: needs --from, the tensors to interpolate towards")
    with target.connect() as mesh, _told_if_interrupted(), _progress() as progress:
        patterns: Sequence[str] = glob
        if from_file is not None:
            given = tensors_of(from_file, mesh, glob)
            form = {"set": given} if lerp is None else {"lerp": given, "weight": lerp}
            patterns = ()
        found = mesh.edit(
            *patterns,
            **form,
            dry_run=dry_run,
            if_step=if_step,
            reset_moments=reset_moments,
            allow_nonfinite=allow_nonfinite,
            note=note,
            wait=wait,
            timeout=timeout,
            progress=progress,
        )
    emit_edit(found, target.format)
    if dry_run:
        say("dry run: nothing was changed")


def tensors_of(path: Path, mesh: Mesh, globs: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """The tensors of a safetensors file whose names match `globs` in the mesh, by name.

    Raises:
        UsageError: the file cannot be read.
        NotFoundError: it has none of the names.
    """
    names = {name: info.name for info in mesh.params(*globs) for name in info.names}
    extras.need("--from", "torch")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            known = set(file.keys())
            found = {own: file.get_tensor(name) for name, own in names.items() if name in known}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--from: {path} cannot be read as safetensors: {error}") from error
    if not found:
        raise NotFoundError(
            f"{path} has none of the {len(set(names.values()))} matching names; it has "
            f"{len(known)} tensors, such as {sorted(known)[:3]}"
        )
    return found


def _bounds(text: str | None) -> tuple[float | None, float | None] | None:
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        if colon:
            return (float(low) if low else None, float(high) if high else None)
    except ValueError:
        pass
    raise UsageError(f"--clamp: {text!r}; expected MIN:MAX, such as -1:1, :6 or 0:")


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress bar of bytes sent; None unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("sending", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sending", total=None, visible=False)

        def told(sent: int, total: int) -> None:
            bar.update(task, completed=sent, total=total, visible=True)

        yield told
