"""Options shared by commands, and `with_target`, which adds them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli import completion, settings
from paramd.errors import UsageError

if TYPE_CHECKING:
    from paramd.mesh.amesh import AsyncMesh
    from paramd.mesh.mesh import Mesh
    from paramd.mesh.peers.control import RestClient

PANEL = "Connection"


class Format(StrEnum):
    """Output format of data on stdout."""

    TABLE = "table"
    WIDE = "wide"
    """A table with all columns, whatever the width of the terminal."""
    JSON = "json"
    JSONL = "jsonl"
    NAME = "name"

    @property
    def is_table(self) -> bool:
        """For people, not for programs."""
        return self in (Format.TABLE, Format.WIDE)


Job = Annotated[
    str | None,
    typer.Option("--job", metavar="NAME", help="Name of the job; required if several run here."
                 " \\[env: PARAMD_JOB]", rich_help_panel=PANEL, autocompletion=completion.jobs),
]  # fmt: skip
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="URL of the control plane, for example "
                 "http://127.0.0.1:8470. \\[env: PARAMD_URL]", rich_help_panel=PANEL),
]  # fmt: skip
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="-|@FILE", help="Read the token from stdin or from FILE. "
                 "\\[env: PARAMD_TOKEN]", rich_help_panel=PANEL),
]  # fmt: skip
TlsCa = Annotated[
    str | None,
    typer.Option("--tls-ca", metavar="FILE", help="CA certificates to trust for https. "
                 "\\[env: PARAMD_TLS_CA]", rich_help_panel=PANEL),
]  # fmt: skip
ContextName = Annotated[
    str | None,
    typer.Option("--context", metavar="NAME", help="A named context in ~/.config/paramd/"
                 "paramd.toml. \\[env: PARAMD_CONTEXT]", rich_help_panel=PANEL,
                 autocompletion=completion.contexts),
]  # fmt: skip
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks of errors. \\[env: PARAMD_DEBUG]")
]
Output = Annotated[
    Format | None,
    typer.Option("-o", "--output", help="Output format; by default a table that fits the terminal. "
                 "\\[env: PARAMD_OUTPUT]", show_default=False),
]  # fmt: skip
Buffers = Annotated[bool, typer.Option("--buffers", help="Include buffers.")]
Globs = Annotated[
    list[str],
    typer.Argument(
        metavar="GLOB",
        help="Name patterns, or slices such as 'w[0:4]'.",
        autocompletion=completion.names,
    ),
]


AnyGlobs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="GLOB", help="Name patterns. Default: all.", autocompletion=completion.names
    ),
]


class Target:
    """What a command works on: the effective settings, and a connection to the mesh."""

    def __init__(self, chosen: settings.Settings) -> None:
        self.settings = chosen

    def named(self, job: str) -> Target:
        """The same, of the job called `job`."""
        return Target(replace(self.settings, job=job))

    def connect(self) -> Mesh:
        """A connected mesh, which the caller closes (`with`).

        Raises:
            UnreachableError, DeniedError, NotFoundError, UsageError: as `paramd.connect`.
        """
        from paramd.mesh.connect import connect

        chosen = self.settings
        return connect(chosen.url, token=chosen.token, job=chosen.job, tls_ca=chosen.tls_ca)

    def async_connect(self) -> AbstractAsyncContextManager[AsyncMesh]:
        """As `connect`, for asyncio."""
        from paramd.mesh.connect import async_connect

        chosen = self.settings
        return async_connect(chosen.url, chosen.token, job=chosen.job, tls_ca=chosen.tls_ca)

    @asynccontextmanager
    async def rest(self) -> AsyncIterator[tuple[RestClient, str | None]]:
        """A client of the control plane, and the job that is named, if any.

        Raises:
            UnreachableError, NotFoundError, UsageError: as `paramd.connect`.
        """
        from paramd.mesh.connect import resolve
        from paramd.mesh.peers.control import RestClient, client_tls

        chosen = self.settings
        url, token, job = resolve(chosen.url, chosen.token, chosen.job)
        client = RestClient(url, token, tls=client_tls(url, chosen.tls_ca))
        try:
            yield client, job
        finally:
            await client.close()

    @property
    def format(self) -> Format:
        """The output format.

        Raises:
            UsageError: the environment or a file names an unknown one.
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
    """Add the shared options to a command and pass it a `Target` as its first argument.

    The options may also precede the command's name; those after it take precedence.
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
        # `main` looked for --debug before anything could fail.
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
    """`text` with its square brackets escaped, which rich would take for markup."""
    return text.replace("[", "\\[")


def examples(*lines: str) -> str:
    """The epilog of a help text: one example per line."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  {escape(line)}" for line in lines)])
