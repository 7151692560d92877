"""The command line `paramd`: all commands, and the entry point.

Nothing here imports torch or gRPC, so that `--help` and completion stay fast; commands do
when they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from paramd.cli import shell
from paramd.cli.alerts import alerts
from paramd.cli.audit import audit
from paramd.cli.certs import certs
from paramd.cli.check import check
from paramd.cli.connect import connect
from paramd.cli.context_command import context as context_group
from paramd.cli.dashboard import dashboard
from paramd.cli.demo import demo
from paramd.cli.diff import diff
from paramd.cli.doctor import doctor
from paramd.cli.edit import edit, edits, undo
from paramd.cli.end import end
from paramd.cli.exports import export, exports, restore
from paramd.cli.exports import schedule as schedule_group
from paramd.cli.follow import follow
from paramd.cli.grads import grads
from paramd.cli.hold import pause, resume, step
from paramd.cli.log import log
from paramd.cli.logs import logs
from paramd.cli.marks import mark, marks, rollback, set_hyperparameters, unmark
from paramd.cli.mcp import mcp
from paramd.cli.options import ContextName, Debug, Job, Token, Url, examples
from paramd.cli.params import params
from paramd.cli.serve import control, sidecar
from paramd.cli.settings import Flags
from paramd.cli.spectrum import spectrum
from paramd.cli.stats import stats
from paramd.cli.status import status
from paramd.cli.summon import summon
from paramd.cli.token import token as token_group
from paramd.cli.top import top
from paramd.cli.updates import updates
from paramd.cli.why import why
from paramd.version import __version__

app = typer.Typer(
    name="paramd",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOOK = "Inspect a running job"
CHANGE = "Change a running job"
RUN = "Run and administer"


def _add(command: Callable[..., None], panel: str, *lines: str) -> None:
    """Register a command under a help panel, with its examples."""
    app.command(rich_help_panel=panel, epilog=examples(*lines))(command)


_add(status, LOOK, "paramd status", "paramd status --job my-run -o json", "paramd status -w")
_add(dashboard, LOOK, "paramd dashboard", "paramd dashboard --job my-run --no-browser")
_add(top, LOOK, "paramd top", "paramd top --every 5")
_add(why, LOOK, "paramd why", "paramd why --rank 3", "paramd why -o json")
_add(logs, LOOK, "paramd logs 3", "paramd logs 3 -n 20 --job my-run", "paramd logs 0 -o json")
_add(alerts, LOOK, "paramd alerts", "paramd alerts --all -o json", "paramd alerts -w")
_add(
    params,
    LOOK,
    "paramd params",
    "paramd params 'layers.*.weight' -o name",
    "paramd params '*' --buffers",
)
_add(
    stats,
    LOOK,
    "paramd stats '*'",
    "paramd stats 'layers.0.*' -o json",
    "paramd stats head.weight --histogram",
)
_add(
    grads,
    LOOK,
    "paramd grads '*'",
    "paramd grads 'layers.*' --every 10 -o jsonl",
    "paramd grads head.weight --histogram -n 1 -o json",
)
_add(updates, LOOK, "paramd updates", "paramd updates 'layers.*' -o json")
_add(
    spectrum,
    LOOK,
    "paramd spectrum layers.0.up.weight",
    "paramd spectrum 'layers.0.up.weight[0:512]' -k 16 -o json",
)
_add(check, LOOK, "paramd check", "paramd check 'layers.*' --rank 3", "paramd check -n 100")
_add(
    diff,
    LOOK,
    "paramd diff checkpoints/step-1000",
    "paramd diff checkpoints/step-1000 checkpoints/step-2000",
    "paramd diff +0 +100 --filter 'layers.*'",
    "paramd diff job:other now -o json",
)
_add(
    log,
    LOOK,
    "paramd log --to tensorboard --dir runs",
    "paramd log --to wandb 'layers.*' --every 60",
)
_add(
    follow,
    LOOK,
    "paramd follow --to vllm http://127.0.0.1:8000 --dir /dev/shm/weights --every 10",
    "paramd follow --to sglang http://127.0.0.1:30000 --dir /dev/shm/weights --deltas",
)
_add(
    summon,
    LOOK,
    "paramd summon '*' -o model.safetensors",
    "paramd summon 'layers.0.*' --dtype bfloat16 -o layer0.safetensors --force",
    "paramd summon 'head.weight[0:4]' -o rows.safetensors",
)
_add(
    edit,
    CHANGE,
    "paramd edit 'layers.0.up.bias' --fill 0",
    "paramd edit 'layers.*.norm.weight' --mul 0.5 --dry-run",
    "paramd edit 'head.weight[0:4]' --from mended.safetensors --note 'dead rows'",
)
_add(edits, CHANGE, "paramd edits", "paramd edits --state APPLIED -o json", "paramd edits 3f2a9c01")
_add(undo, CHANGE, "paramd undo 3f2a9c01")
_add(
    restore,
    CHANGE,
    "paramd restore checkpoints/step-1000",
    "paramd restore checkpoints/step-1000 --reset-moments --note 'before the spike'",
)
_add(mark, CHANGE, "paramd mark before-lr-bump")
_add(marks, LOOK, "paramd marks", "paramd marks -o json")
_add(unmark, CHANGE, "paramd unmark before-lr-bump")
_add(
    rollback,
    CHANGE,
    "paramd rollback before-lr-bump",
    "paramd rollback 1200 --yes --note 'loss jumped'",
)
_add(
    set_hyperparameters,
    CHANGE,
    "paramd set-hyperparameters 0 lr=1e-4",
    "paramd set-hyperparameters 'optimizer 1 group 0' betas=0.9,0.98 weight_decay=0.1",
)
_add(pause, CHANGE, "paramd pause", "paramd pause --lease 120", "paramd pause --keep")
_add(step, CHANGE, "paramd step", "paramd step 10")
_add(resume, CHANGE, "paramd resume")
_add(
    export,
    LOOK,
    "paramd export checkpoints/step-{step} --wait",
    "paramd export checkpoints/final --max-shard-size 2GB --dtype bfloat16 --assets hf-config",
    "paramd export checkpoints/resume --format dcp",
)
_add(
    exports,
    LOOK,
    "paramd exports",
    "paramd exports --state FAILED -o json",
    "paramd exports 3f2a9c01 --wait",
    "paramd exports 3f2a9c01 --cancel",
)
_add(mcp, RUN, "paramd mcp --job my-run", "paramd mcp --job my-run --changes --http 8765")
_add(end, RUN, "paramd end my-run")
_add(
    connect,
    RUN,
    "paramd connect me@login.example",
    "paramd connect gpu-17 --job my-run --remote '~/venv/bin/paramd'",
)
_add(doctor, RUN, "paramd doctor", "paramd doctor -o json")
_add(demo, RUN, "paramd demo", "paramd demo --keep")
app.add_typer(schedule_group, name="export-schedule", rich_help_panel=LOOK)
app.add_typer(audit, name="audit", rich_help_panel=RUN)
app.add_typer(control, name="control", rich_help_panel=RUN)
app.add_typer(sidecar, name="sidecar", rich_help_panel=RUN)
app.add_typer(token_group, name="token", rich_help_panel=RUN)
app.add_typer(context_group, name="context", rich_help_panel=RUN)
app.add_typer(certs, name="certs", rich_help_panel=RUN)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paramd {__version__}")
        raise typer.Exit


@app.callback(epilog=examples("paramd demo", "paramd status", "paramd stats '*'"))
def root(
    context: typer.Context,
    job: Job = None,
    url: Url = None,
    token: Token = None,
    context_name: ContextName = None,
    debug: Debug = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Inspect and edit the weights of a running distributed PyTorch job.

    Data goes to stdout, messages to stderr. Settings come from flags, then
    PARAMD_* variables, then paramd.toml (here, then in ~/.config/paramd).

    Exit codes: 0 ok, 1 general, 2 usage, 3 unreachable, 4 not found,
    5 conflict, 6 partial result, 7 denied, 8 timeout.
    """
    context.obj = Flags(job=job, url=url, token=token, context_name=context_name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Entry point of the `paramd` script."""
    given = list(arguments) if arguments is not None else sys.argv[1:]
    debug = "--debug" in given or os.environ.get("PARAMD_DEBUG", "0") not in ("", "0")
    return shell.run(
        lambda: app(given, prog_name="paramd", standalone_mode=False), debug=debug, given=given
    )
