"""The command line `paramd`: all commands, and the entry point.

Nothing here imports torch or gRPC, so that `--help` and completion stay fast; commands do
when they run.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer import Option

from paramd.cli import shell
from paramd.cli.audit import audit
from paramd.cli.connect import connect
from paramd.cli.context_command import context as context_group
from paramd.cli.dashboard import dashboard
from paramd.cli.demo import demo
from paramd.cli.doctor import doctor
from paramd.cli.edit import edit, edits, pause, resume, step, undo
from paramd.cli.ended import cleanup
from paramd.cli.exports import export, exports, restore
from paramd.cli.exports import schedule as schedule_group
from paramd.cli.insight import diff, logs, spectrum, updates, verify, why
from paramd.cli.integrations import follow, mcp, track
from paramd.cli.marks import mark, marks, rollback, set_hyperparameters, unmark
from paramd.cli.options import ContextName, Debug, Job, Token, Url, examples
from paramd.cli.serve import certs, control, sidecar
from paramd.cli.settings import Flags
from paramd.cli.status import alerts, jobs, status, watch
from paramd.cli.summon import summon
from paramd.cli.tensors import grads, params, stats
from paramd.cli.token import token as token_group
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


def _add(panel: str, command: Callable[..., None], *lines: str) -> None:
    """Register a command under a help panel, with examples of its arguments."""
    name = command.__name__.replace("_", "-")
    told = examples(*(f"paramd {name} {line}".rstrip() for line in lines))
    app.command(rich_help_panel=panel, epilog=told)(command)


_add(LOOK, jobs, "", "--all")
_add(LOOK, status, "", "--job my-run -o json", "-w")
_add(LOOK, dashboard, "", "--job my-run --no-browser")
_add(LOOK, why, "", "--rank 3", "-o json")
_add(LOOK, logs, "3", "3 -n 20 --job my-run", "0 -o json")
_add(LOOK, alerts, "", "--all -o json", "-w")
_add(LOOK, watch, "", "on", "off")
_add(LOOK, params, "", "'layers.*.weight' -o name", "'*' --buffers")
_add(LOOK, stats, "", "'layers.*' 'norm>10'", "'layers.0.*' -o json", "head.weight --histogram")
_add(LOOK, grads, "'*'", "'layers.*' --every-steps 10 -o jsonl", "head.weight --histogram -n 1")
_add(LOOK, updates, "", "'layers.*' -o json")
_add(LOOK, spectrum, "layers.0.up.weight", "'layers.0.up.weight[0:512]' -k 16 -o json")
_add(LOOK, verify, "", "'layers.*' --rank 3", "-n 100")
_add(
    LOOK,
    diff,
    "checkpoints/step-1000",
    "checkpoints/step-1000 checkpoints/step-2000",
    "+0 +100 --filter 'layers.*'",
    "job:other now -o json",
)
_add(LOOK, track, "--to tensorboard --dir runs", "--to wandb 'layers.*' --every 60")
_add(
    LOOK,
    follow,
    "--to vllm http://127.0.0.1:8000 --dir /dev/shm/weights --every-steps 10",
    "--to sglang http://127.0.0.1:30000 --dir /dev/shm/weights --deltas",
)
_add(
    LOOK,
    summon,
    "'*' -f model.safetensors",
    "'layers.0.*' --dtype bfloat16 -f layer0.safetensors --overwrite",
    "'head.weight[0:4]' -f rows.safetensors",
)
_add(
    CHANGE,
    edit,
    "'layers.0.up.bias' --fill 0",
    "'layers.*.norm.weight' --mul 0.5 --dry-run",
    "'head.weight[0:4]' --from fixed.safetensors --note 'dead rows'",
)
_add(CHANGE, edits, "", "--state APPLIED -o json", "3f2a9c01")
_add(CHANGE, undo, "3f2a9c01", "last")
_add(
    CHANGE,
    restore,
    "checkpoints/step-1000",
    "checkpoints/step-1000 --reset-moments --note 'before the spike'",
)
_add(CHANGE, mark, "before-lr-bump")
_add(LOOK, marks, "", "-o json")
_add(CHANGE, unmark, "before-lr-bump")
_add(CHANGE, rollback, "before-lr-bump", "1200 --yes --note 'loss jumped'")
_add(
    CHANGE,
    set_hyperparameters,
    "",
    "0 lr=1e-4",
    "'optimizer 1 group 0' betas=0.9,0.98 weight_decay=0.1",
)
_add(CHANGE, pause, "", "--lease 120", "--keep")
_add(CHANGE, step, "", "10")
_add(CHANGE, resume, "")
_add(
    LOOK,
    export,
    "checkpoints/step-{step} --wait",
    "checkpoints/final --max-shard-size 2GB --dtype bfloat16 --assets hf-config",
    "checkpoints/resume --format dcp",
)
_add(LOOK, exports, "", "--state FAILED -o json", "3f2a9c01 --wait", "3f2a9c01 --cancel")
_add(RUN, mcp, "--job my-run", "--job my-run --changes --http 8765")
_add(RUN, cleanup, "my-run")
_add(RUN, connect, "me@login.example", "gpu-17 --job my-run --remote '~/venv/bin/paramd'")
_add(RUN, doctor, "", "-o json")
_add(RUN, demo, "", "--keep")
app.add_typer(schedule_group, name="export-schedule", rich_help_panel=LOOK)
for group, name in (
    (audit, "audit"),
    (control, "control"),
    (sidecar, "sidecar"),
    (token_group, "token"),
    (context_group, "context"),
    (certs, "certs"),
):
    app.add_typer(group, name=name, rich_help_panel=RUN)


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
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
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
