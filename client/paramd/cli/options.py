"""Options shared by commands, and `with_target`, which adds them."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from paramd.cli import completion, settings
from paramd.cli.output import Column, Format, Listing, Row, emit
from paramd.clock import seconds_of
from paramd.errors import UsageError

if TYPE_CHECKING:
    from paramd.mesh.amesh import AsyncMesh
    from paramd.mesh.mesh import Mesh
    from paramd.mesh.peers.control import RestClient
    from paramd.places import Endpoint

PANEL = "Connection"


def duration(text: str) -> float:
    """Seconds, of an option that takes "90", "90s" or "5m". Raises UsageError."""
    return seconds_of(text, "duration")


def interval(text: str) -> float:
    """As `duration`, from 0.2 s to an hour. Raises UsageError."""
    found = duration(text)
    if not 0.2 <= found <= 3600.0:
        raise UsageError(f"{text}; expected 0.2 s to 1 h")
    return found


def completed(metavar: str, help: str, complete: completion.Complete) -> Any:
    """A positional argument that the shell completes."""
    return Argument(metavar=metavar, help=help, autocompletion=complete)


Job = Annotated[
    str | None,
    Option(
        "--job",
        metavar="NAME",
        help="Name of the job; required if several run here. \\[env: PARAMD_JOB]",
        rich_help_panel=PANEL,
        autocompletion=completion.jobs,
    ),
]
Url = Annotated[
    str | None,
    Option(
        "--url",
        metavar="URL",
        help="URL of the control plane, for example http://127.0.0.1:8470. \\[env: PARAMD_URL]",
        rich_help_panel=PANEL,
    ),
]
Token = Annotated[
    str | None,
    Option(
        "--token",
        metavar="-|@FILE",
        help="Read the token from stdin or from FILE. \\[env: PARAMD_TOKEN]",
        rich_help_panel=PANEL,
    ),
]
TlsCa = Annotated[
    str | None,
    Option(
        "--tls-ca",
        metavar="FILE",
        help="CA certificates to trust for https. \\[env: PARAMD_TLS_CA]",
        rich_help_panel=PANEL,
    ),
]
ContextName = Annotated[
    str | None,
    Option(
        "--context",
        metavar="NAME",
        help="A named context in ~/.config/paramd/paramd.toml. \\[env: PARAMD_CONTEXT]",
        rich_help_panel=PANEL,
        autocompletion=completion.contexts,
    ),
]
Debug = Annotated[bool, Option("--debug", help="Show tracebacks of errors. \\[env: PARAMD_DEBUG]")]
Output = Annotated[
    Format | None,
    Option(
        "-o",
        "--output",
        help="Output format; by default a table that fits the terminal. \\[env: PARAMD_OUTPUT]",
        show_default=False,
    ),
]
Every = Annotated[
    float, Option("--every", metavar="S", parser=interval, help="Seconds between two samples.")
]
Buffers = Annotated[bool, Option("--buffers", help="Include buffers.")]
Dtype = Annotated[
    str | None, Option("--dtype", metavar="NAME", help="Cast floats, e.g. to bfloat16.")
]
Merge = Annotated[
    bool, Option("--merge", help="Merge the LoRA adapter into its base model, under its names.")
]
Adapter = Annotated[
    str | None,
    Option("--adapter", metavar="NAME", help="The adapter, where the model has several."),
]
Replica = Annotated[
    int | None,
    Option(
        "--replica",
        metavar="RANK",
        min=0,
        help="Of this rank's replica, where ranks hold the same; by default rank 0's.",
    ),
]
Globs = Annotated[
    list[str],
    Argument(
        metavar="GLOB",
        help="Name patterns, or slices such as 'w[0:4]'.",
        autocompletion=completion.names,
    ),
]
AnyGlobs = Annotated[
    list[str] | None,
    Argument(metavar="GLOB", help="Name patterns. Default: all.", autocompletion=completion.names),
]
Followed = Annotated[
    list[str] | None, Argument(metavar="[GLOB]", help="Parameters; all by default.")
]


class Target:
    """The target of a command: the effective settings, and a connection to the mesh."""

    def __init__(self, chosen: settings.Settings) -> None:
        self.settings = chosen

    def named(self, job: str) -> Target:
        """The same settings, with the job called `job`."""
        return Target(replace(self.settings, job=job))

    def token_of(self, job: str) -> str:
        """The token that this job's control plane is asked with. Raises as `paramd.connect`."""
        from paramd.mesh.connect import resolve

        chosen = self.reached()
        return resolve(chosen.url, chosen.token, job)[1]

    def holding(self, token: str, job: str) -> Target:
        """The same control plane and this job of it, asked with another token."""
        return Target(replace(self.reached(), token=token, job=job))

    def at(self, endpoint: Endpoint) -> Target:
        """The same settings, with this control plane's address, token and job."""
        return Target(
            replace(
                self.settings,
                url=endpoint.url,
                token=endpoint.token,
                job=endpoint.job,
                url_file=None,
            )
        )

    def reached(self) -> settings.Settings:
        """The settings to connect with: a url of the working directory's file has its token.

        Such a url may only choose among the jobs that this user runs on this host, whose token is
        in the state dir; no other token goes there, unless `--token` was given. Raises UsageError
        if none of them is there.
        """
        chosen = self.settings
        if chosen.url_file is None or chosen.url is None:
            return chosen
        from paramd.places import running_jobs

        found = [
            endpoint
            for endpoint in running_jobs()
            if endpoint.url == chosen.url.rstrip("/") and chosen.job in (None, endpoint.job)
        ]
        if not found:
            raise UsageError(
                f"{chosen.url_file}: url {chosen.url!r} is no job that you run on this host, and a "
                "file in the working directory sends no token elsewhere; give --url, or set "
                f"PARAMD_URL and PARAMD_TOKEN, or write both url and token_file into "
                f"{settings.own_file()}"
            )
        token = chosen.token if chosen.token is not None else found[0].token
        return replace(chosen, token=token, url_file=None)

    def connect(self) -> Mesh:
        """A connected mesh, which the caller closes (`with`). Raises as `paramd.connect`."""
        from paramd.mesh.connect import connect

        chosen = self.reached()
        return connect(chosen.url, token=chosen.token, job=chosen.job, tls_ca=chosen.tls_ca)

    def async_connect(self) -> AbstractAsyncContextManager[AsyncMesh]:
        """As `connect`, for asyncio."""
        from paramd.mesh.connect import async_connect

        chosen = self.reached()
        return async_connect(chosen.url, chosen.token, job=chosen.job, tls_ca=chosen.tls_ca)

    @asynccontextmanager
    async def rest(self) -> AsyncIterator[tuple[RestClient, str | None]]:
        """A client of the control plane, and the named job, if any. As `paramd.connect`."""
        from paramd.mesh.connect import located, trust
        from paramd.mesh.peers.control import NOT_BEGUN, RestClient
        from paramd.places import STARTING_S

        chosen = self.reached()
        url, token, job, find = located(chosen.url, chosen.token, chosen.job)
        starts = find if url == NOT_BEGUN else None
        client = RestClient(url, token, tls=trust(url, chosen.tls_ca), find=starts)
        try:
            await client.begun(STARTING_S)
            yield client, job
        finally:
            await client.close()

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The control plane's answer to one request. Raises as `RestClient.send`."""

        async def answer() -> Any:
            async with self.rest() as (client, _):
                return await client.send(method, path, body)

        return asyncio.run(answer())

    def show(
        self,
        name: str,
        rows: Sequence[Row],
        columns: Sequence[Column],
        /,
        *,
        id_key: str = "name",
        **about: object,
    ) -> None:
        """Print rows as a `Listing` in the chosen format. Raises as `format`."""
        listing = Listing(name=name, rows=rows, columns=columns, about=about, id_key=id_key)
        emit(listing, self.format)

    @property
    def format(self) -> Format:
        """The output format; UsageError if the environment or a file names an unknown one."""
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


SHARED: dict[str, Any] = {
    "job": Job,
    "url": Url,
    "token": Token,
    "tls_ca": TlsCa,
    "context_name": ContextName,
}


def with_target(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command and pass it a `Target` as its first argument.

    The options may also precede the command's name; those after it take precedence.
    """
    return _with_options(command, SHARED)


def with_output(command: Callable[..., None]) -> Callable[..., None]:
    """As `with_target`, for a command that prints data, with --output (`Target.format`)."""
    return _with_options(command, {"output": Output} | SHARED)


def _with_options(command: Callable[..., None], shared: dict[str, Any]) -> Callable[..., None]:
    own = inspect.signature(command, eval_str=True)
    _, *parameters = own.parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Context
    )
    added = [
        inspect.Parameter(name, keyword, default=None, annotation=kind)
        for name, kind in shared.items()
    ]
    debug = inspect.Parameter("debug", keyword, default=False, annotation=Debug)
    moved = [p.replace(kind=keyword) for p in parameters]

    @wraps(command)
    def run(context: Context, **given: Any) -> None:
        # `main` reads --debug before anything can fail.
        given.pop("debug")
        # A command's own --output counts, too.
        own_output = settings.Flags(output=given.get("output"))
        flags = own_output.over(settings.Flags(**{name: given.pop(name) for name in shared}))
        flags = flags.over(context.find_root().obj)
        command(Target(settings.load(flags, stdin=sys.stdin)), **given)

    signature = own.replace(parameters=[context, *moved, *added, debug])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def escape(text: str) -> str:
    """`text` with its square brackets escaped, which rich would take for markup."""
    return text.replace("[", "\\[")


def examples(*lines: str) -> str:
    """The epilog of a help text: one example per line."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  {escape(line)}" for line in lines)])
