"""`paramd certs init`: a test CA and certificates."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from paramd import extras
from paramd.cli.options import examples
from paramd.cli.shell import say

certs = typer.Typer(help="Test certificates for TLS.", no_args_is_help=True)


@certs.command(
    "init",
    epilog=examples(
        "paramd certs init certs --name train-1.example --name 10.0.0.7",
        "export PARAMD_TLS_CERT=certs/server.pem PARAMD_TLS_KEY=certs/server.key",
        "export PARAMD_TLS_CA=certs/ca.pem",
    ),
)
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the files.")],
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="DNS name or IP address of the server, in "
                     "addition to this host's own. May be repeated."),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=397, help="Validity of both certificates.")
    ] = 30,
) -> None:  # fmt: skip
    """Create a test CA, a server certificate and a client certificate.

    The CA's private key is written next to them, so use it for testing only.
    Run again with the same DIR, the same CA signs new certificates, which
    servers reload by themselves. In production, use your own CA.
    """
    extras.need("certs init", "service")
    from paramd.security import authority

    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *(name or [])]
    for path in authority.write(directory, names=list(dict.fromkeys(names)), days=days):
        print(path)
    say(f"keys are in {directory}, readable only by you; anyone with ca.key can sign certificates")
