"""`paramd context list|show`: the named contexts in the user's own paramd.toml."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paramd.cli import completion, settings
from paramd.cli.options import ContextName, Debug, Output, Target, completed, examples
from paramd.cli.output import Column
from paramd.cli.parts import RUN, CommandPart, Commands
from paramd.cli.settings import Context, choose
from paramd.cli.shell import say
from paramd.errors import UsageError

context = typer.Typer(help="Named contexts: short names for control planes.", no_args_is_help=True)


COLUMNS = (
    Column("in_force", "CURRENT", lambda used: "*" if used else ""),
    Column("name", "NAME"),
    Column("url", "URL"),
    Column("job", "JOB"),
)
DETAILS = (
    *COLUMNS,
    Column("token_file", "TOKEN FILE"),
    Column("token", "TOKEN"),
    Column("tls_ca", "TLS CA"),
)


@context.command("list", epilog=examples("paramd context list", "PARAMD_CONTEXT=lab paramd status"))
def list_all(
    root: typer.Context,
    context_name: ContextName = None,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """List the contexts in ~/.config/paramd/paramd.toml, and mark the current one."""
    found = settings.own_contexts()
    used = _used(root, context_name)
    _show([_row(found[name], used) for name in sorted(found)], COLUMNS, output)
    if not found:
        say(f"no contexts in {settings.own_file()}; add a table [contexts.NAME] with a url")


@context.command("show", epilog=examples("paramd context show", "paramd context show lab -o json"))
def show(
    root: typer.Context,
    name: Annotated[
        str | None, completed("NAME", "Default: the current context.", completion.contexts)
    ] = None,
    context_name: ContextName = None,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Show one context. Its token is never read, only whether the file is readable."""
    used = _used(root, context_name)
    wanted = name if name is not None else used
    if wanted is None:
        raise UsageError(
            "no context is set; name one, set PARAMD_CONTEXT, or see: paramd context list"
        )
    _show([_row(choose(wanted), used)], DETAILS, output)


def _used(root: typer.Context, context_name: str | None) -> str | None:
    flags = settings.Flags(context_name=context_name)
    found = settings.context_in_force(flags.over(root.find_root().obj))
    return found.name if found is not None else None


def _show(rows: list[dict[str, Any]], columns: tuple[Column, ...], output: str | None) -> None:
    # Not `settings.load`, which reads the token: a context whose token is missing must show, too.
    named = output if output is not None else os.environ.get("PARAMD_OUTPUT") or None
    Target(settings.Settings(output=named)).show("contexts", rows, columns)


def _row(one: Context, used: str | None) -> dict[str, Any]:
    texts = {key: text if text is not None else "" for key, text in asdict(one).items()}
    return {**texts, "in_force": one.name == used, "token": _token_state(one)}


def _token_state(one: Context) -> str:
    if one.token_file is None:
        return "from PARAMD_TOKEN"
    return "readable" if os.access(Path(one.token_file).expanduser(), os.R_OK) else "not readable"


class Contexts(CommandPart):
    """Named contexts."""

    name = "contexts"

    def add_to(self, commands: Commands) -> None:
        commands.add_group(RUN, "context", context)
