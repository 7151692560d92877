"""`paramd control`, `sidecar`, `certs`: the service's own programs, and certificates to try."""

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from paramd import extras
from paramd.cli.options import examples
from paramd.cli.parts import RUN, CommandPart, Commands
from paramd.cli.shell import say

control = typer.Typer(help="Run a control plane.", no_args_is_help=True)
sidecar = typer.Typer(help="Run sidecars.", no_args_is_help=True)
certs = typer.Typer(help="Test certificates for TLS.", no_args_is_help=True)

# Remaining arguments are parsed by the program exec'ed, `-- --help` included.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@control.command(
    "serve",
    context_settings=_PASS_ON,
    epilog=examples(
        "paramd control serve --listen 127.0.0.1:8470",
        "paramd control serve --job my-run --listen 127.0.0.1:8470 < secrets.json",
        "paramd control serve -- --help",
    ),
)
def serve_control(context: typer.Context) -> None:
    """Run a control plane in the foreground, for a site or for one job.

    Without --job it serves a site, where jobs register with
    paramd.attach(..., control=URL); its first token is in the state dir, in
    _site/token. With --job it serves that job alone; `paramd.attach` normally
    starts it. The job's secrets are read as one JSON line from stdin, never
    from options: {"job", "incarnation", "world_size", "private_key", "token"}.
    All other options: `paramd control serve -- --help`.
    """
    _become("paramd_service.control", context.args)


@sidecar.command(
    "serve",
    context_settings=_PASS_ON,
    epilog=examples(
        "paramd sidecar serve --job my-run --rank 0 "
        "--socket ~/.local/state/paramd/my-run/rank-0.sock",
        "paramd sidecar serve -- --help",
    ),
)
def serve_sidecar(context: typer.Context) -> None:
    """Run the sidecar of one rank in the foreground, before its trainer starts.

    Without it, `paramd.attach` starts one. The trainer sends the job's public
    key and the rank's ticket over the socket. All options:
    `paramd sidecar serve -- --help`.
    """
    _become("paramd_service.sidecar", context.args)


@sidecar.command("host", epilog=examples("PARAMD_STATE_DIR=/run/paramd/state paramd sidecar host"))
def host_sidecars() -> None:
    """Start sidecars for trainings in other containers of the pod.

    Trainings with PARAMD_SIDECAR=external and the same PARAMD_STATE_DIR, on a
    volume that both containers mount at one path, have their sidecars started
    here, and keep them when their own container is restarted. Both run as the
    same user. On SIGTERM the sidecars drain, and it ends.
    """
    _become("paramd_service.sidecar.host", [])


def _become(module: str, arguments: list[str]) -> None:
    """Exec `module`, so that signals and the exit code are its own."""
    extras.need(module, "service")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


@certs.command(
    "init",
    epilog=examples(
        "paramd certs init certs --name train-1.example --name 10.0.0.7",
        "export PARAMD_TLS_CERT=certs/server.pem PARAMD_TLS_KEY=certs/server.key",
        "export PARAMD_TLS_CA=certs/ca.pem",
    ),
)
def init(
    directory: Annotated[Path, Argument(metavar="DIR", help="Where to write the files.")],
    name: Annotated[
        list[str] | None,
        Option(
            "--name",
            metavar="NAME",
            help="DNS name or IP address of the server, in "
            "addition to this host's own. May be repeated.",
        ),
    ] = None,
    days: Annotated[
        int, Option("--days", min=1, max=397, help="Validity of both certificates.")
    ] = 30,
) -> None:
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


class Serve(CommandPart):
    """The service's own programs."""

    name = "serve"

    def add_to(self, commands: Commands) -> None:
        commands.add_group(RUN, "control", control)
        commands.add_group(RUN, "sidecar", sidecar)


class Certs(CommandPart):
    """Certificates to try."""

    name = "certs"

    def add_to(self, commands: Commands) -> None:
        commands.add_group(RUN, "certs", certs)
