"""`paramd control serve` and `paramd sidecar serve`: the service's own programs."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import typer

from paramd.cli.options import examples
from paramd.errors import UsageError

control = typer.Typer(help="The control plane of a job.", no_args_is_help=True)
sidecar = typer.Typer(help="The sidecar of one rank.", no_args_is_help=True)

# What follows is the other program's business, --help of it included.
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
    """Run a control plane in the foreground: a site's, or one job's.

    Without --job it serves a site: jobs register with paramd.attach(...,
    control=URL). Its first token lies in the state dir, in _site/token.
    With --job it is that job's own, which `paramd.attach` starts by itself;
    the job's secrets come as one JSON line on stdin, never as options:
    {"job", "incarnation", "world_size", "private_key", "token"}.
    Options are passed on: see `paramd control serve -- --help`.
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

    `paramd.attach` starts one by itself where none listens. Options are passed
    on: see `paramd sidecar serve -- --help`. The job's public key
    and the rank's ticket come from the trainer, over the socket.
    """
    _become("paramd_service.sidecar", context.args)


def _become(module: str, arguments: list[str]) -> None:
    """Replaces this process, so that signals and exit code are the program's own."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UsageError(f"{module} is not installed; run: pip install 'paramd[service]'")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
