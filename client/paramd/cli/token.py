"""`paramd token create|list|revoke`: user tokens of a control plane."""

import time
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer
from typer import Option

from paramd.cli import completion
from paramd.cli.options import Output, Target, completed, examples, with_output, with_target
from paramd.cli.output import Column, seconds
from paramd.cli.parts import RUN, CommandPart, Commands
from paramd.cli.shell import one_line, say
from paramd.clock import seconds_of

token = typer.Typer(help="User tokens and their roles.", no_args_is_help=True)


@token.command(
    "create",
    epilog=examples(
        "paramd token create --role reader --ttl 12h --name notebook",
        "paramd token create --role viewer --ttl 4w > viewer.token",
        "paramd token create --role trainer --jobs 'team-a-*'",
    ),
)
@with_target
def create(
    target: Target,
    role: Annotated[
        str,
        Option(
            "--role",
            metavar="ROLE",
            help="viewer: names, state, statistics; reader: "
            "also values; editor: also edits; exporter: values and exports; trainer: "
            "registers jobs; admin: everything.",
            autocompletion=completion.roles,
        ),
    ],
    ttl: Annotated[
        str, Option("--ttl", metavar="TIME", help="Validity: 90s, 15m, 12h, 30d or 4w.")
    ] = "30d",
    name: Annotated[
        str | None, Option("--name", metavar="NAME", help="Name in lists and the audit.")
    ] = None,
    jobs: Annotated[
        str | None,
        Option("--jobs", metavar="PATTERNS", help="Only these jobs, such as 'team-a-*,eval'."),
    ] = None,
    output: Output = None,
) -> None:
    """Create a token and print it. It is shown only once."""
    body: dict[str, Any] = {"role": role, "ttl_s": seconds_of(ttl, "--ttl")}
    if name is not None:
        body["name"] = name
    if jobs is not None:
        body["jobs"] = jobs
    made = target.ask("POST", "/tokens", body)
    if output is None:
        say(f"token {made['name']}, role {made['role']}; save it, it is not shown again")
        print(one_line(str(made["token"])))
        return
    _show(target, [made])


@token.command("list", epilog=examples("paramd token list", "paramd token list -o json"))
@with_output
def list_all(target: Target) -> None:
    """List names, roles and validity of all tokens, never the tokens themselves."""
    _show(target, target.ask("GET", "/tokens")["tokens"])


@token.command("revoke", epilog=examples("paramd token revoke notebook"))
@with_target
def revoke(
    target: Target,
    name: Annotated[
        str, completed("NAME", "As shown by paramd token list.", completion.token_names)
    ],
) -> None:
    """Revoke a token, immediately and permanently."""
    target.ask("DELETE", f"/tokens/{quote(name, safe='')}")
    say(f"token {name} is revoked; joined sidecars refuse its tickets within seconds")


def _show(target: Target, rows: list[dict[str, Any]]) -> None:
    columns = (Column("name", "NAME"), Column("role", "ROLE"), Column("state", "STATE"))
    target.show("tokens", [{**row, "state": _state(row, time.time())} for row in rows], columns)


def _state(row: Mapping[str, Any], now_s: float) -> str:
    if row["revoked_s"] is not None:
        return "revoked"
    if row["expires_s"] is None:
        return "valid"
    left_s = float(row["expires_s"]) - now_s
    return f"valid for {seconds(left_s)}" if left_s > 0 else "expired"


class Tokens(CommandPart):
    """User tokens."""

    name = "tokens"

    def add_to(self, commands: Commands) -> None:
        commands.add_group(RUN, "token", token)
