"""The door by which a subject enters the command line: `CommandPart`, and what it adds to.

`paramd` is a list of parts (`commands.py`). A module of a part imports neither torch nor gRPC: its
commands do when they run, so that help and completion stay fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

from paramd.cli.options import examples

LOOK: Final = "Inspect a running job"
CHANGE: Final = "Change a running job"
RUN: Final = "Run and administer"
"""Panels of the help; a part may name one of its own."""


class Commands:
    """Takes the commands of one part."""

    def __init__(self) -> None:
        self._added = typer.Typer(rich_markup_mode="rich")

    def add(self, panel: str, command: Callable[..., None], *lines: str) -> None:
        """Add a command, called as its function with dashes.

        Args:
            panel: Where the help lists it.
            command: Its parameters, with typer's annotations, are its options; its docstring is its
                help. `paramd.cli.options.with_output` adds those that find a job.
            lines: Arguments of examples, for the end of its help.
        """
        name = command.__name__.replace("_", "-")
        shown = examples(*(f"paramd {name} {line}".rstrip() for line in lines)) if lines else None
        self._added.command(rich_help_panel=panel, epilog=shown)(command)

    def add_group(self, panel: str, name: str, group: typer.Typer) -> None:
        """Add a command that has commands of its own."""
        self._added.add_typer(group, name=name, rich_help_panel=panel)

    def made(self) -> TyperGroup:
        """What was added, by name in `commands`."""
        return get_group(self._added)


class CommandPart:
    """The commands of one subject.

    Imported and made when one of its commands is run, or when all are listed.
    """

    name: ClassVar[str]

    def add_to(self, commands: Commands) -> None:
        """Add its commands, in the order of the help. No I/O."""
