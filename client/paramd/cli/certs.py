"""`paramd certs init`: a CA and certificates to try TLS with."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from paramd.cli.options import examples
from paramd.cli.shell import say
from paramd.errors import UsageError

certs = typer.Typer(help="Certificates to try TLS with.", no_args_is_help=True)


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
        typer.Option("--name", metavar="NAME", help="DNS name or IP address of the server; "
                     "may be given again. This host's own are always there."),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=397, help="Validity of server and client.")
    ] = 30,
) -> None:  # fmt: skip
    """Make a test CA, a server's and a client's certificate.

    The CA's key lies beside them: good for a trial and for tests. With the same
    DIR again, the same CA signs new certificates; servers take them up by
    themselves. In production, use the certificates of your own CA.
    """
    try:
        from paramd.security import authority
    except ModuleNotFoundError as error:
        raise UsageError("this needs cryptography; run: pip install 'paramd[service]'") from error
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *(name or [])]
    for path in authority.write(directory, names=list(dict.fromkeys(names)), days=days):
        print(path)
    say(f"keys are in {directory}, readable by you alone; ca.key signs for whoever has it")
