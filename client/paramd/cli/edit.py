"""`paramd edit`, `edits`, `undo`, `pause`, `step`, `resume`: edit or pause a job on all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from paramd import extras
from paramd.cli import completion, ended
from paramd.cli.ended import Past
from paramd.cli.options import Globs, Target, completed, duration, with_output
from paramd.cli.output import Column, Format, count, number, seconds, size, when
from paramd.cli.parts import CHANGE, CommandPart, Commands
from paramd.cli.shell import say
from paramd.cli.summon import bar
from paramd.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    import torch

    from paramd.mesh.edits.calls import Edit, PauseState
    from paramd.mesh.mesh import Mesh

LOOK_S = 1.0
SENDING = "sending"

Wait = Annotated[bool, Option("--wait/--no-wait", help="Wait until it is applied or refused.")]
Timeout = Annotated[
    float, Option("--timeout", metavar="S", parser=duration, help="Seconds to wait.")
]
Note = Annotated[str, Option("--note", metavar="TEXT", help="Reason, kept with the edit.")]
AgreeTimeout = Annotated[
    float,
    Option(
        "--timeout", metavar="S", parser=duration, help="Seconds to wait for all ranks to agree."
    ),
]


COLUMNS = (
    Column("id", "ID", lambda found: found[:8]),
    Column("incarnation", "RUN", right=True, if_many=True),
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


@with_output
def edits(
    target: Target,
    edit_id: Annotated[
        str | None, completed("[ID]", "Show one edit in full.", completion.edit_ids)
    ] = None,
    state: Annotated[
        str | None,
        Option("--state", metavar="STATE", help="Only edits in this state, e.g. APPLIED."),
    ] = None,
    limit: Annotated[int, Option("--limit", metavar="N", help="List at most N.")] = 50,
) -> None:
    """List the edits of a job, newest first; with an ID, show one.

    Shows the stored edits of an ended job, too, on its host.
    """
    past = ended.find(target)
    if past is not None:
        _show_past(target, past, edit_id, state, limit)
        return
    with target.connect() as mesh:
        if edit_id is not None:
            show_edit(target, mesh.get_edit(edit_id))
            return
        found = mesh.edits(state=state.upper() if state is not None else None, limit=limit)
        _show(target, found, job=mesh.job, incarnation=mesh.incarnation)


def _show_past(
    target: Target, past: Past, edit_id: str | None, state: str | None, limit: int
) -> None:
    from paramd.documents import read_document
    from paramd.mesh.edits.calls import Edit

    wanted = state.upper() if state is not None else None
    found = [
        read_document(Edit, one)
        for one in past.edits(id=edit_id, state=wanted, limit=max(limit, 2))
    ]
    past.say()
    if edit_id is None:
        _show(target, found[:limit], job=past.job, incarnation=past.last.incarnation)
    elif len(found) == 1:
        show_edit(target, found[0])
    elif found:
        raise UsageError(f"more than one edit's id begins with {edit_id!r}; give more characters")
    else:
        raise NotFoundError(f"no edit of job {past.job!r} has an id that begins {edit_id[:40]!r}")


@with_output
def undo(
    target: Target,
    edit_id: Annotated[
        str, completed("ID", "Its ID, or the beginning; last: your newest.", completion.edit_ids)
    ],
    force: Annotated[
        bool, Option("--force", help="Undo even if later edits changed the same elements.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Change nothing; show the effect.")] = False,
    wait: Wait = True,
) -> None:
    """Undo an edit: an addition is subtracted again, anything else restores the old values.

    `last` is the edit in effect that was applied last, of those made with the token in use.
    Restored values lose the training updates made since the edit. --dry-run shows
    the values before and after.
    """
    with target.connect() as mesh, _told_if_interrupted():
        found = mesh.undo(edit_id, force=force, dry_run=dry_run, wait=wait)
    show_edit(target, found)
    if dry_run:
        say("DRY RUN: nothing was changed")


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


def show_edit(target: Target, edit: Edit) -> None:
    """Print one edit to stdout; with a table, also before and after to stderr."""
    row = _row(edit, target.format)
    if target.format in (Format.JSON, Format.JSONL):
        told = asdict(edit) | {"undoable": edit.undoable, "undo_refusal": edit.undo_refusal}
        row |= {name: told[name] for name in _TOLD_OF_ONE}
    target.show("edits", [row], COLUMNS, id_key="id", job=edit.job)
    if target.format.is_table and edit.before is not None and edit.after is not None:
        for moment, found in (("before", edit.before), ("after", edit.after)):
            say(
                f"{moment}: min {found.min:.4g}, max {found.max:.4g}, mean {found.mean:.4g}, "
                f"norm {found.norm:.4g}, {found.nan_count:,} NaN, {found.inf_count:,} Inf"
            )


_TOLD_OF_ONE = (
    "ops",
    "before",
    "after",
    "reason",
    "committed_by",
    "undo_of",
    "undone_by",
    "undoable",
    "undo_refusal",
    "rollback",
    "hyperparameters",
    "warning",
)


def _show(target: Target, found: Sequence[Edit], **about: object) -> None:
    rows = [_row(edit, target.format) for edit in found]
    target.show("edits", rows, COLUMNS, id_key="id", **about)


def _row(edit: Edit, form: Format) -> dict[str, Any]:
    """A row of `COLUMNS`. Tables show a dry run as one; documents keep the state that the control
    plane gives it, beside `dry_run`."""
    from paramd.mesh.edits.calls import what_text

    why = edit.reason
    if not why and edit.undone_by:
        why = f"undone by {edit.undone_by[:8]}"
    return {
        "id": edit.id,
        "incarnation": edit.incarnation,
        "step": edit.step,
        "size_bytes": edit.size_bytes,
        "stop_ms": edit.stop_ms,
        "created_s": edit.created_s,
        "actor": edit.actor,
        "note": edit.note,
        "state": edit.shown_state if form.is_table else str(edit.state),
        "dry_run": edit.dry_run,
        "what": what_text(edit),
        "names": list(edit.names),
        "why": why,
    }


def _operation(flag: str, metavar: str, help: str) -> Any:
    return Option(flag, metavar=metavar, help=help, rich_help_panel="Operation (exactly one)")


@with_output
def edit(
    target: Target,
    glob: Globs,
    fill: Annotated[float | None, _operation("--fill", "X", "Set to a number.")] = None,
    mul: Annotated[float | None, _operation("--mul", "X", "Multiply by a number.")] = None,
    add: Annotated[float | None, _operation("--add", "X", "Add a number.")] = None,
    clamp: Annotated[
        str | None, _operation("--clamp", "MIN:MAX", "Clamp; either bound may be omitted.")
    ] = None,
    from_file: Annotated[
        Path | None,
        _operation("--from", "FILE.safetensors", "Set to the file's tensors of the same names."),
    ] = None,
    lerp: Annotated[
        float | None,
        Option("--lerp", metavar="W", help="With --from: interpolate, x + W * (file - x)."),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Change nothing; show the effect.")] = False,
    if_step: Annotated[
        int | None,
        Option("--if-step", metavar="N", help="Apply only at this step; pause training first."),
    ] = None,
    reset_moments: Annotated[
        bool, Option("--reset-moments", help="Zero the optimizer state of the changed elements.")
    ] = False,
    allow_nonfinite: Annotated[
        bool, Option("--allow-nonfinite", help="Allow NaN and infinities (admins only).")
    ] = False,
    note: Note = "",
    wait: Wait = True,
    timeout: Timeout = 60.0,
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
    with target.connect() as mesh, _told_if_interrupted(), bar(SENDING, hidden=True) as moved:
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
            progress=lambda sent, total: moved(SENDING, sent, total),
        )
    show_edit(target, found)
    if dry_run:
        say("DRY RUN: nothing was changed")


def tensors_of(path: Path, mesh: Mesh, globs: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """The tensors of a safetensors file whose names match `globs` in the mesh, by name.

    Raises UsageError if the file cannot be read, NotFoundError if it has none of the names.
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


PAUSE_COLUMNS = (
    Column("state", "STATE"),
    Column("step", "STEP", count, right=True),
    Column("steps_left", "STEPS LEFT", count, right=True),
    Column("lease_left_s", "LEASE LEFT", lambda s: seconds(s) if s else "-", right=True),
    Column("holder", "HOLDER"),
)


@with_output
def pause(
    target: Target,
    lease_s: Annotated[
        float,
        Option(
            "--lease",
            metavar="S",
            parser=duration,
            help="Seconds until training resumes by itself.",
        ),
    ] = 30.0,
    keep: Annotated[
        bool, Option("--keep", help="Renew the lease until Ctrl-C, for at most 5 minutes.")
    ] = False,
    timeout: AgreeTimeout = 60.0,
) -> None:
    """Pause training on all ranks, at the same boundary.

    Training resumes with `paramd resume` or when the lease expires; with --keep,
    when this command exits.
    """
    with target.connect() as mesh:
        _show_pause(target, mesh.job, mesh.pause(lease=lease_s, renew=keep, timeout=timeout))
        if not keep:
            return  # the mesh says how long it lasts
        say("training is paused; Ctrl-C resumes it")
        try:
            while mesh.pause_state().state != "running":
                time.sleep(LOOK_S)
            say("training has resumed")
        except KeyboardInterrupt:
            mesh.resume(timeout=timeout)
            say("training resumed")


@with_output
def step(
    target: Target,
    steps: Annotated[int, Argument(metavar="[N]", help="Number of updates to run.")] = 1,
    wait: Annotated[
        bool, Option("--wait/--no-wait", help="Wait until the updates are finished.")
    ] = True,
    timeout: Annotated[
        float, Option("--timeout", metavar="S", parser=duration, help="Seconds to wait for them.")
    ] = 60.0,
) -> None:
    """Run a few updates of a paused training, then pause it again."""
    with target.connect() as mesh:
        _show_pause(target, mesh.job, mesh.step(steps, wait=wait, timeout=timeout))


@with_output
def resume(target: Target, timeout: AgreeTimeout = 60.0) -> None:
    """Resume a paused training."""
    with target.connect() as mesh:
        _show_pause(target, mesh.job, mesh.resume(timeout=timeout))


def _show_pause(target: Target, job: str, state: PauseState) -> None:
    target.show("pause", [asdict(state)], PAUSE_COLUMNS, id_key="state", job=job)


class Edits(CommandPart):
    """Edits of parameters."""

    name = "edits"

    def add_to(self, commands: Commands) -> None:
        commands.add(
            CHANGE,
            edit,
            "'layers.0.up.bias' --fill 0",
            "'layers.*.norm.weight' --mul 0.5 --dry-run",
            "'head.weight[0:4]' --from fixed.safetensors --note 'dead rows'",
        )
        commands.add(CHANGE, edits, "", "--state APPLIED -o json", "3f2a9c01")
        commands.add(CHANGE, undo, "3f2a9c01", "last")


class Pauses(CommandPart):
    """Training that waits, and goes on step by step."""

    name = "pauses"

    def add_to(self, commands: Commands) -> None:
        commands.add(CHANGE, pause, "", "--lease 120", "--keep")
        commands.add(CHANGE, step, "", "10")
        commands.add(CHANGE, resume, "")
