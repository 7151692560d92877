"""`paramd mark`, `marks`, `unmark`, `rollback`, `set-hyperparameters`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from paramd.cli.edit import Note, Timeout, Wait, show_edit
from paramd.cli.options import Target, with_output, with_target
from paramd.cli.output import Column, count, size, when
from paramd.cli.parts import CHANGE, LOOK, CommandPart, Commands
from paramd.cli.shell import say
from paramd.errors import UsageError

if TYPE_CHECKING:
    from paramd.mesh.edits.calls import Mark

COLUMNS = (
    Column("name", "NAME", lambda found: found if found else "(standing)"),
    Column("step", "STEP", count, right=True),
    Column("size_bytes", "SIZE", size, right=True),
    Column("made_s", "WHEN", when, drop=2),
    Column("by", "WHO", drop=1),
    Column("why_not_whole", "INCOMPLETE BECAUSE"),
)

Name = Annotated[str, Argument(metavar="NAME", help="The restore point's name.")]


@with_output
def mark(target: Target, name: Name, timeout: Timeout = 60.0) -> None:
    """Make a restore point: keep the complete current state of a training in memory.

    Restore points are in the sidecars' memory and lost when they end; they are not
    checkpoints. Training pauses while the state is copied. Needs
    attach(..., resume="auto").
    """
    with target.connect() as mesh:
        _show(target, mesh.job, [mesh.mark(name, timeout=timeout)])


@with_output
def marks(target: Target) -> None:
    """List the restore points and other states that a training can be rolled back to."""
    with target.connect() as mesh:
        _show(target, mesh.job, mesh.marks())


@with_target
def unmark(target: Target, name: Name) -> None:
    """Delete a restore point and free its memory."""
    with target.connect() as mesh:
        mesh.unmark(name)
    say(f"restore point {name} is deleted")


@with_output
def rollback(
    target: Target,
    to: Annotated[
        str,
        Argument(metavar="NAME|STEP", help="A restore point's name, or a step of `paramd marks`."),
    ],
    yes: Annotated[
        bool, Option("--yes", "-y", help="Skip the confirmation; required without a terminal.")
    ] = False,
    note: Note = "",
    wait: Wait = True,
    timeout: Timeout = 60.0,
) -> None:
    """Return a training to a restore point or a step, on all ranks or on none.

    Restores parameters, optimizer state, hyper-parameters and extra_state.
    `paramd undo` returns to the state before the rollback.
    """
    wanted: str | int = int(to) if to.isdigit() else to
    with target.connect() as mesh:
        if not yes:
            _confirm(wanted, mesh.status().step)
        found = mesh.rollback(wanted, note=note, wait=wait, timeout=timeout)
    show_edit(target, found)


def _confirm(to: str | int, step: int) -> None:
    if not sys.stdin.isatty():
        raise UsageError("rollback: stdin is not a terminal; confirm with --yes")
    what = f"step {to}" if isinstance(to, int) else f"restore point {to!r}"
    typer.confirm(
        f"Training is at step {step}. Put it back to {what}? The steps since then are repeated",
        abort=True,
        err=True,
    )


GROUP_COLUMNS = (
    Column("optimizer", "OPTIMIZER", right=True),
    Column("group", "GROUP", right=True),
    Column(
        "values",
        "VALUES",
        lambda values: ", ".join(f"{name}={one}" for name, one in values.items()),
    ),
)


@with_output
def set_hyperparameters(
    target: Target,
    group: Annotated[
        str | None,
        Argument(
            metavar="[GROUP]",
            help="'group N', N, or 'optimizer M group N'. Default: list "
            "the present values of all groups.",
        ),
    ] = None,
    values: Annotated[
        list[str] | None,
        Argument(metavar="NAME=VALUE...", help="Such as lr=1e-4 or betas=0.9,0.98."),
    ] = None,
    note: Note = "",
    wait: Wait = True,
    timeout: Timeout = 60.0,
) -> None:
    """Set hyper-parameters of a parameter group, on all ranks at one step or on none.

    Without arguments, list the present values of all groups. A scheduler
    overwrites lr at its next step. `paramd undo` restores the previous values.
    """
    if group is None:
        with target.connect() as mesh:
            groups = mesh.hyperparameters()
            rows = [asdict(one) for one in groups]
            about = {"job": mesh.job, "incarnation": mesh.incarnation, "step": groups.step}
        target.show("groups", rows, GROUP_COLUMNS, id_key="group", **about)
        return
    if not values:
        raise UsageError("NAME=VALUE is missing: what to set, such as lr=1e-4")
    chosen = f"group {group}" if group.isdigit() else group
    with target.connect() as mesh:
        found = mesh.set_hyperparameters(
            chosen, note=note, wait=wait, timeout=timeout, **_values(values)
        )
    show_edit(target, found)
    if found.warning:
        say(f"note: {found.warning}")


def _values(texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in ("note", "wait", "timeout"):
            raise UsageError(f"{text[:80]!r}; expected NAME=VALUE, such as lr=1e-4")
        numbers = [_number(name, part) for part in value.strip("()").split(",") if part.strip()]
        if not numbers:
            raise UsageError(f"{text[:80]!r}; expected a number, or several with commas")
        found[name] = numbers if len(numbers) > 1 or "," in value else numbers[0]
    return found


def _number(name: str, text: str) -> int | float:
    with suppress(ValueError):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name}: {text[:40]!r} is not a number") from None


def _show(target: Target, job: str, found: Sequence[Mark]) -> None:
    rows = [asdict(one) for one in found]
    for row in rows:
        row["why_not_whole"] = row.pop("reason")
    target.show("marks", rows, COLUMNS, id_key="name", job=job)


class Marks(CommandPart):
    """Restore points, rollbacks and hyper-parameters."""

    name = "marks"

    def add_to(self, commands: Commands) -> None:
        commands.add(CHANGE, mark, "before-lr-bump")
        commands.add(LOOK, marks, "", "-o json")
        commands.add(CHANGE, unmark, "before-lr-bump")
        commands.add(CHANGE, rollback, "before-lr-bump", "1200 --yes --note 'loss jumped'")
        commands.add(
            CHANGE,
            set_hyperparameters,
            "",
            "0 lr=1e-4",
            "'optimizer 1 group 0' betas=0.9,0.98 weight_decay=0.1",
        )
