"""On the command line: `paramd kurtosis`."""

from paramd.cli.options import AnyGlobs, Target, with_output
from paramd.cli.output import Column, number
from paramd.cli.parts import LOOK, CommandPart, Commands


@with_output
def kurtosis(target: Target, globs: AnyGlobs = None) -> None:
    """Show the kurtosis of weights: how heavy their tails are (normal: 3)."""
    with target.connect() as mesh:
        rows = mesh.parts.kurtosis.compute(*(globs or []))
        shown = [{"name": row.name, "kurtosis": row.kurtosis} for row in rows]
        columns = [Column("name", "NAME"), Column("kurtosis", "KURTOSIS", number, right=True)]
        target.show("tensors", shown, columns, job=mesh.job, step=rows[0].step)


class Kurtosis(CommandPart):
    """Adds the command."""

    name = "kurtosis"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, kurtosis, "", "'layers.*' -o json")
