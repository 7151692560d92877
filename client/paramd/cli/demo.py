"""`paramd demo`: a real training, looked into from outside, as a user would."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paramd.cli import demo_changes
from paramd.cli import params as params_command
from paramd.cli import stats as stats_command
from paramd.cli import status as status_command
from paramd.cli.options import Debug, Format
from paramd.cli.output import Listing, emit, seconds, size
from paramd.cli.saving import save, untie
from paramd.errors import DataLossError, ParamdError, UsageError
from paramd.places import read_endpoint, state_dir

if TYPE_CHECKING:
    from paramd.cli.training import Training
    from paramd.mesh.mesh import Mesh
    from paramd.mesh.results import Summoned

LAYER = "layers.0.*"
WEIGHT = "layers.0.up.weight"
FIRST_STEPS = 3
ROUNDS = 6
ROUND_S = 1.5
OPEN_TIMEOUT_S = 120.0


def demo(
    job: Annotated[str, typer.Option("--job", metavar="NAME", help="Name of the job.")] = "demo",
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the training running until Ctrl-C.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a small GPT on two ranks and look into it, from outside.

    FSDP2 on this machine's CPU, real text, nothing downloaded. Lists parameters,
    prints statistics and a histogram, summons a layer while the loss falls, saves
    it and reads it back; then gradients, an edit and its undo, a write-back, and
    a checkpoint of the running training. Ends by itself.
    """
    _check_installed()
    from paramd.cli.training import free_job_name, started

    name = free_job_name(job)
    with tempfile.TemporaryDirectory(prefix="paramd-demo-") as folder:
        _note(f"Two ranks train a small GPT with FSDP2 on the CPU, as job {name!r} ...")
        with started(name, Path(folder), keep=keep) as training:
            training.wait_until_open(timeout_s=OPEN_TIMEOUT_S)
            try:
                _tour(training, Path(folder))
            except ParamdError:
                _note(f"Sidecars and control plane left their logs in {state_dir() / name}")
                raise
            _next_steps(name, running=keep)
            if keep:
                _keep(training)
        _note("The training has ended.")


def _check_installed() -> None:
    needed = ("torch", "safetensors", "fastapi", "paramd_service")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UsageError(f"the demo needs {', '.join(missing)}; run: pip install 'paramd[demo]'")


def _tour(training: Training, folder: Path) -> None:
    from paramd.mesh.connect import connect

    # Not what PARAMD_URL and PARAMD_TOKEN may name: the training that we started.
    endpoint = read_endpoint(training.job)
    with connect(endpoint.url, endpoint.token, job=training.job) as mesh:
        _wait_until_well(mesh, training)
        _heading("What the ranks do", f"paramd status --job {training.job}")
        emit(status_command.listing(mesh.status()), Format.TABLE)
        _heading("What there is to read", f"paramd params --job {training.job}")
        _list_params(mesh)
        _heading("Statistics of a layer, computed where it lies", f"paramd stats '{LAYER}'")
        emit(
            stats_command.listing(mesh.stats(LAYER), age_s=0.0, with_histogram=False),
            Format.TABLE,
        )
        _heading("A histogram of one weight", f"paramd stats {WEIGHT} --histogram")
        stats_command.print_histograms(mesh.stats(WEIGHT, histogram=True))
        _heading("The layer, whole, while the loss falls", f"mesh.summon('{LAYER}')")
        found = _watch(mesh, training)
        path = folder / f"layer0-step-{found.step}.safetensors"
        _heading("Saved, and read back", f"paramd summon '{LAYER}' -o {path.name}")
        _save_and_compare(found, path)
        demo_changes.show(mesh, training.checkpoints, _heading)


def _wait_until_well(mesh: Mesh, training: Training) -> None:
    """Until every rank answers and the first updates are done."""
    deadline_s = time.monotonic() + OPEN_TIMEOUT_S
    while True:
        found = mesh.status()
        if found.step >= FIRST_STEPS and not any(row.reason for row in found):
            return
        training.check(deadline_s, "its ranks were not all reachable")
        time.sleep(0.2)


def _list_params(mesh: Mesh) -> None:
    found = mesh.params("*")
    shown = [info for info in found if not info.fqn.startswith("layers.") or "layers.0" in info.fqn]
    emit(
        Listing(
            name="params",
            rows=[params_command.row(info) for info in shown],
            columns=params_command.COLUMNS,
            about={},
        ),
        Format.TABLE,
    )
    hidden = len(found) - len(shown)
    _note(f"and {hidden} more like them; {sum(info.numel for info in found):,} elements in all")


def _watch(mesh: Mesh, training: Training) -> Summoned:
    """Summons the layer a few times; returns the last one."""
    print(f"{'STEP':>6}  {'LOSS':>7}  {'NORM OF ' + WEIGHT:>26}  {'MOVED BY':>9}  {'TOOK':>7}")
    mesh.summon(WEIGHT)  # the first one loads torch, which the last column is not about
    found = mesh.summon(LAYER)
    before = found[WEIGHT]
    for number in range(ROUNDS):
        if number:
            time.sleep(ROUND_S)
            found = mesh.summon(LAYER)
        weight = found[WEIGHT]
        print(
            f"{found.step:>6}  {training.loss_around(found.step):>7.4f}  "
            f"{weight.norm().item():>26.5f}  {(weight - before).norm().item():>9.5f}  "
            f"{seconds(found.seconds):>7}",
            flush=True,
        )
        before = weight
    return found


def _save_and_compare(found: Summoned, path: Path) -> None:
    from safetensors import safe_open

    size_bytes = save(found, path, replace=False)
    kept, _ = untie(found)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        names = set(opened.keys())
        wrong = [name for name in kept if not kept[name].equal(opened.get_tensor(name))]
    if wrong or names != kept.keys() or metadata["paramd_step"] != str(found.step):
        raise DataLossError(f"the file does not hold what was summoned: {wrong or names}")
    print(
        f"{path.name}: {size(size_bytes)}, step {metadata['paramd_step']}; the safetensors "
        f"library reads {len(names)} tensors, all equal to what was summoned"
    )


def _next_steps(job: str, *, running: bool) -> None:
    _heading("What to try next", "")
    if not running:
        _note("paramd demo --keep        leaves the training running; then, in another terminal:")
    for line in (
        f"paramd status --job {job}",
        f"paramd params 'layers.*.weight' --job {job} -o name",
        f"paramd stats '*' --job {job} -o json",
        f"paramd summon '*' -o model.safetensors --job {job}",
        f"paramd grads 'layers.0.*' --job {job}",
        f"paramd edit 'layers.0.norm1.*' --mul 0.9 --dry-run --job {job}",
        f"paramd pause --job {job}; paramd step 3 --job {job}; paramd resume --job {job}",
        f"python -c \"import paramd; print(paramd.connect(job='{job}').summon('head.*'))\"",
    ):
        _note(f"  {line}")


def _keep(training: Training) -> None:
    _note("The training goes on; Ctrl-C ends it.")
    try:
        training.wait()
    except KeyboardInterrupt:
        _note("Ending it after the next step ...")
    else:
        training.check(math.inf, "it ended")


def _heading(text: str, command: str) -> None:
    """A line above what follows, on stderr, in order with what stdout has."""
    sys.stdout.flush()
    from rich.console import Console
    from rich.text import Text

    line = Text(f"\n{text}", style="bold")
    if command:
        line.append(f"   {command}", style="not bold dim")
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def _note(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
