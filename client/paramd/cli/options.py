"""Every option that more than one command has, declared once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd import places
from paramd.cli import settings
from paramd.errors import UsageError

if TYPE_CHECKING:
    from paramd.mesh.mesh import Mesh

PANEL = "Which job"


class Format(StrEnum):
    """How data is written to stdout."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    NAME = "name"


def _running_jobs() -> list[str]:
    """What the shell offers after --job."""
    return [endpoint.job for endpoint in places.running_jobs()]


Job = Annotated[
    str | None,
    typer.Option("--job", metavar="NAME", help="Job to ask; needed when several run here."
                 " \\[env: PARAMD_JOB]", rich_help_panel=PANEL, autocompletion=_running_jobs),
]  # fmt: skip
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Control plane to ask, for example "
                 "http://127.0.0.1:8470. \\[env: PARAMD_URL]", rich_help_panel=PANEL),
]  # fmt: skip
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="-|@FILE", help="Where the token stands: - is stdin. "
                 "Better: \\[env: PARAMD_TOKEN]", rich_help_panel=PANEL),
]  # fmt: skip
TlsCa = Annotated[
    str | None,
    typer.Option("--tls-ca", metavar="FILE", help="CA certificates to trust when the url is "
                 "https. \\[env: PARAMD_TLS_CA]", rich_help_panel=PANEL),
]  # fmt: skip
ContextName = Annotated[
    str | None,
    typer.Option("--context", metavar="NAME", help="A named context of ~/.config/paramd/"
                 "paramd.toml. \\[env: PARAMD_CONTEXT]", rich_help_panel=PANEL),
]  # fmt: skip
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error. \\[env: PARAMD_DEBUG]")
]
Output = Annotated[
    Format | None,
    typer.Option("-o", "--output", help="How to write the data; a table by default. "
                 "\\[env: PARAMD_OUTPUT]", show_default=False),
]  # fmt: skip
Buffers = Annotated[bool, typer.Option("--buffers", help="Buffers too, not only parameters.")]


class Target:
    """What a command asks: the settings in force, and the way to the mesh."""

    def __init__(self, chosen: settings.Settings) -> None:
        self.settings = chosen

    def connect(self) -> Mesh:
        """A connected mesh, to be closed by the caller (`with`).

        Raises:
            UnreachableError, DeniedError, NotFoundError, UsageError: as `paramd.connect`.
        """
        from paramd.mesh.connect import connect

        chosen = self.settings
        return connect(chosen.url, token=chosen.token, job=chosen.job, tls_ca=chosen.tls_ca)

    @property
    def format(self) -> Format:
        """The output format in force.

        Raises:
            UsageError: the environment or a file names another one.
        """
        named = self.settings.output
        if named is None:
            return Format.TABLE
        try:
            return Format(named)
        except ValueError:
            raise UsageError(
                f"output: {named!r}; expected one of {', '.join(Format)} "
                "(from PARAMD_OUTPUT or paramd.toml)"
            ) from None


def with_target(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the shared options; its first parameter becomes the `Target`.

    They may stand before the command's name as well; after it they win.
    """
    own = inspect.signature(command, eval_str=True)
    _, *parameters = own.parameters.values()
    shared: dict[str, Any] = {
        "job": Job,
        "url": Url,
        "token": Token,
        "tls_ca": TlsCa,
        "context_name": ContextName,
    }
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in shared.items()
    ]
    debug = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug
    )
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

    @wraps(command)
    def run(context: typer.Context, **given: Any) -> None:
        # `main` has looked for --debug before anything could fail.
        given.pop("debug")
        flags = settings.Flags(**{name: given.pop(name) for name in shared})
        output = given.get("output")
        flags = settings.Flags(output=output).over(flags)
        before = context.find_root().obj
        if isinstance(before, settings.Flags):
            flags = flags.over(before)
        command(Target(settings.load(flags, stdin=sys.stdin)), **given)

    signature = own.replace(parameters=[context, *keyword, *added, debug])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def escape(text: str) -> str:
    """`text` as it is, where square brackets would be markup."""
    return text.replace("[", "\\[")


def examples(*lines: str) -> str:
    """The epilog of a help text: one example a line."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  {escape(line)}" for line in lines)])
