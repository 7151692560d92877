"""The command line `paramd`: its entry point, and the options before a command.

Nothing here imports torch or gRPC, so that `--help` and completion stay fast; commands do
when they run.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from paramd.cli import shell
from paramd.cli.commands import PartCommands
from paramd.cli.options import ContextName, Debug, Job, Token, Url, examples
from paramd.cli.settings import Flags
from paramd.version import __version__


class Root(TyperGroup):
    """All commands; each is imported when it is wanted."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = PartCommands()


app = typer.Typer(
    name="paramd",
    cls=Root,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paramd {__version__}")
        raise typer.Exit


@app.callback(epilog=examples("paramd demo", "paramd status", "paramd stats '*'"))
def root(
    context: typer.Context,
    job: Job = None,
    url: Url = None,
    token: Token = None,
    context_name: ContextName = None,
    debug: Debug = False,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Inspect and edit the weights of a running distributed PyTorch job.

    Data goes to stdout, messages to stderr. Settings come from flags, then
    PARAMD_* variables, then paramd.toml (here, then in ~/.config/paramd).

    Exit codes: 0 ok, 1 general, 2 usage, 3 unreachable, 4 not found,
    5 conflict, 6 partial result, 7 denied, 8 timeout.
    """
    context.obj = Flags(job=job, url=url, token=token, context_name=context_name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Entry point of the `paramd` script."""
    given = list(arguments) if arguments is not None else sys.argv[1:]
    debug = "--debug" in given or os.environ.get("PARAMD_DEBUG", "0") not in ("", "0")
    return shell.run(
        lambda: app(given, prog_name="paramd", standalone_mode=False), debug=debug, given=given
    )
