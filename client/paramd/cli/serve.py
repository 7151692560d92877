"""`paramd control serve` and `paramd sidecar serve`: exec the service's own programs."""

from __future__ import annotations

import os
import sys

import typer

from paramd import extras
from paramd.cli.options import examples

control = typer.Typer(help="Run a control plane.", no_args_is_help=True)
sidecar = typer.Typer(help="Run sidecars.", no_args_is_help=True)

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


@sidecar.command(
    "host",
    epilog=examples("PARAMD_STATE_DIR=/run/paramd/state paramd sidecar host"),
)
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
