"""`paramd demo`: train a small GPT and run the main commands on it, from another process."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paramd import extras, places
from paramd.cli import status as status_command
from paramd.cli import tensors
from paramd.cli.options import Debug
from paramd.cli.output import Format, Listing, emit, seconds, size
from paramd.cli.parts import RUN, CommandPart, Commands
from paramd.cli.shell import one_line
from paramd.errors import DataLossError, DeadlineError, ParamdError, UnreachableError
from paramd.places import read_endpoint, state_dir

if TYPE_CHECKING:
    from paramd.mesh.mesh import Mesh
    from paramd.mesh.results import Summoned

MODULE = "paramd.examples.train_gpt"

DESTINATION = "checkpoints"
"""Name of the export destination configured for the training: a separate directory."""

RANKS = 2
MAX_STEPS = 20_000
"""Ends the training even if the demo was killed and cannot."""

POLL_S = 0.05
STOP_S = 30.0
LOSS_S = 10.0
MEAN_OF = 20
SHOWN_LINES = 80
"""Shown of a failed training: torchrun prints a lot after the ranks' own last lines."""

_LOSS = re.compile(r"^step (\d+) loss ([0-9.]+)$", re.MULTILINE)

GRADIENTS = "layers.*.up.weight"
ROWS = "layers.0.up.weight[0:4]"
FRAMES = 4

LAYER = "layers.0.*"
WEIGHT = "layers.0.up.weight"
FIRST_STEPS = 3
ROUNDS = 6
ROUND_S = 1.5
OPEN_TIMEOUT_S = 120.0


@dataclass(eq=False)
class Training:
    """A training started by this process."""

    job: str
    _process: subprocess.Popen[bytes]
    _log_path: Path
    checkpoints: Path
    """Directory of `DESTINATION`."""

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_until_open(self) -> None:
        """Wait for the job; UnreachableError: the training exited, DeadlineError: too slow."""
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        while not any(found.job == self.job for found in places.running_jobs()):
            self.check(deadline_s, "it did not attach")
            time.sleep(POLL_S)

    def check(self, deadline_s: float, what: str) -> None:
        """Print the last lines and raise if the training has exited or the deadline has passed."""
        if self.running and time.monotonic() <= deadline_s:
            return
        print(*map(one_line, self.last_lines().split("\n")), sep="\n", file=sys.stderr, flush=True)
        if not self.running:
            raise UnreachableError(
                f"the training exited with code {self._process.returncode}; its last lines are "
                "above. To run it alone: torchrun --standalone --nproc-per-node 2 "
                f"-m {MODULE} --no-attach"
            )
        raise DeadlineError(f"the training: {what} in time; its last lines are above")

    def _losses(self) -> dict[int, float]:
        text = self._log_path.read_text(errors="replace")
        return {int(step): float(loss) for step, loss in _LOSS.findall(text)}

    def loss_around(self, step: int) -> float:
        """Mean loss of the last `MEAN_OF` updates up to `step`, fewer at the start.

        Raises UnreachableError or DeadlineError if the training never printed that step.
        """
        deadline_s = time.monotonic() + LOSS_S
        while step not in (losses := self._losses()):
            self.check(deadline_s, f"it did not print step {step}")
            time.sleep(POLL_S)
        near = [losses[at] for at in range(step - MEAN_OF + 1, step + 1) if at in losses]
        return sum(near) / len(near)

    def last_lines(self) -> str:
        """The end of its output."""
        with self._log_path.open(errors="replace") as file:
            return "".join(deque(file, SHOWN_LINES)).rstrip()

    def wait(self) -> int:
        """Wait for it to exit; return its exit code."""
        return self._process.wait()

    def stop(self) -> None:
        """Ask the ranks to end after a step; kill them after `STOP_S`. Idempotent."""
        if not self.running:
            return
        # Each rank is in a separate session, so no group signal reaches the ranks once torchrun is
        # gone. Taken before the signal: a pidfd cannot hit a reused pid.
        ranks = _children(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pidfd in ranks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def _children(pid: int) -> list[int]:
    """A pidfd for each live child of a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                with suppress(ProcessLookupError):
                    found.append(os.pidfd_open(int(child)))
    return found


@contextmanager
def started(
    job: str, folder: Path, *, keep: bool, ranks: int = RANKS, control: str | None = None
) -> Iterator[Training]:
    """Ranks that train until the block ends, logging to a file in `folder`.

    `keep`: train on past `MAX_STEPS`. `control`: URL of a site to register at, with the token in
    PARAMD_TOKEN_FILE.
    """
    log_path, checkpoints = folder / "training.log", folder / "checkpoints"
    checkpoints.mkdir()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # If the demo is killed, sidecars and control plane exit sooner than the default 10 min.
        "PARAMD_LINGER_S": "10",
        "PARAMD_DESTINATIONS": json.dumps({DESTINATION: str(checkpoints)}),
    }
    environment.pop("PARAMD_TOKEN", None)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        MODULE,
        "--job",
        job,
        "--steps",
        str(MAX_STEPS),
        "--every",
        "1",
        *(["--keep"] if keep else []),
        *(["--control", control] if control is not None else []),
    ]
    with _Interrupts() as interrupts, log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C must reach only us: we then stop the ranks in order.
            start_new_session=True,
        )
        training = Training(job, process, log_path, checkpoints)
        try:
            interrupts.release()
            yield training
        finally:
            interrupts.hold()
            training.stop()


class _Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP as KeyboardInterrupt, deferred while blocked. Blocked at first.

    So none strikes between the fork of a child and the code that stops it, or while it is
    being stopped.
    """

    _NAMES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._held = True
        self._came = False

    def __enter__(self) -> _Interrupts:
        self._before = {name: signal.signal(name, self._note) for name in self._NAMES}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def hold(self) -> None:
        """Defer signals from now on."""
        self._held = True

    def release(self) -> None:
        """Raise signals from now on; a deferred one raises here."""
        self._held = False
        if self._came:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: object) -> None:
        self._came = True
        if not self._held:
            raise KeyboardInterrupt


def free_job_name(wanted: str) -> str:
    """`wanted`, with a number appended if a job of that name is running."""
    taken = {endpoint.job for endpoint in places.running_jobs()}
    number, name = 1, wanted
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


def _gradients(mesh: Mesh) -> None:
    print(
        f"{'UPDATE':>6}  {'NORM':>10}  {'SMALLEST':>10}  {'LARGEST':>10}  {'ZEROS':>6}  {'NAN':>4}"
    )
    for number, frame in enumerate(mesh.grads(GRADIENTS, kind="stats"), 1):
        total = frame.total
        print(
            f"{frame.step:>6}  {total.norm:>10.4g}  {total.min:>10.3g}  {total.max:>10.3g}  "
            f"{total.zero_count:>6,}  {total.nan_count:>4,}",
            flush=True,
        )
        if number == FRAMES:
            return


def _edit_and_undo(mesh: Mesh) -> None:
    edit = mesh.edit(ROWS, mul=0.5, note="demo")
    print(
        f"edit {edit.id[:8]}: {edit.state} at step {edit.step}; training stopped for "
        f"{seconds((edit.stop_ms or 0.0) / 1e3)}"
    )
    undo = mesh.undo(edit.id)
    print(f"edit {undo.id[:8]}: {undo.state} at step {undo.step}, undoing {edit.id[:8]}")


def _write_back(mesh: Mesh) -> None:
    with mesh.summon(ROWS, writeback=True, note="demo") as params:
        (rows,) = params.values()
        rows.clamp_(-0.05, 0.05)
    edit = mesh.edits(limit=1)[0]
    if edit.step != params.step:
        raise DataLossError(f"the write-back was applied at step {edit.step}, not {params.step}")
    print(f"paused at step {params.step}; edit {edit.id[:8]}: {edit.state} at step {edit.step}")


def _export(mesh: Mesh, checkpoints: Path) -> None:
    from safetensors import safe_open

    export = mesh.export(f"{DESTINATION}/now").wait()
    path = checkpoints / "now" / "model.safetensors"
    with safe_open(path, framework="pt") as opened:
        names = set(opened.keys())
    missing = {info.name for info in mesh.params()} - names
    if missing:
        raise DataLossError(f"the checkpoint is missing {sorted(missing)[:3]}")
    print(
        f"{path.name}: {size(path.stat().st_size)}, step {export.step}, {len(names)} tensors, "
        "read back with the safetensors library"
    )


def demo(
    job: Annotated[str, Option("--job", metavar="NAME", help="Name of the job.")] = "demo",
    keep: Annotated[
        bool, Option("--keep", help="Leave the training running until Ctrl-C.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a small GPT on two ranks, and inspect and edit it while it runs.

    FSDP2 on this machine's CPU; nothing is downloaded. Lists parameters, prints
    statistics and a histogram, summons a layer while the loss falls, saves it
    and reads it back; then shows gradients, an edit and its undo, a write-back,
    and a checkpoint of the running training. Exits by itself.
    """
    extras.need("the demo", "demo")
    name = free_job_name(job)
    with tempfile.TemporaryDirectory(prefix="paramd-demo-") as folder:
        _note(f"Two ranks train a small GPT with FSDP2 on the CPU, as job {name!r} ...")
        with started(name, Path(folder), keep=keep) as training:
            training.wait_until_open()
            try:
                _tour(training, Path(folder))
            except ParamdError:
                _note(f"The logs of sidecars and control plane are in {state_dir() / name}")
                raise
            _next_steps(name, running=keep)
            if keep:
                _keep(training)
        _note("Training has stopped.")


def _tour(training: Training, folder: Path) -> None:
    from paramd.mesh.connect import connect

    # Connect to our own training, whatever PARAMD_URL and PARAMD_TOKEN say.
    endpoint = read_endpoint(training.job)
    with connect(endpoint.url, endpoint.token, job=training.job) as mesh:
        _wait_until_well(mesh, training)
        _heading("State of the ranks", f"paramd status --job {training.job}")
        emit(status_command.listing(mesh.status()), Format.TABLE)
        _heading("Parameters", f"paramd params --job {training.job}")
        _list_params(mesh)
        _heading("Statistics of a layer, computed in place", f"paramd stats '{LAYER}'")
        emit(tensors.listing(mesh.stats(LAYER), age_s=0.0, with_histogram=False), Format.TABLE)
        _heading("A histogram of one weight", f"paramd stats {WEIGHT} --histogram")
        tensors.print_histograms(mesh.stats(WEIGHT, histogram=True))
        _heading("The full layer, while the loss falls", f"mesh.summon('{LAYER}')")
        summoned = _watch(mesh, training)
        path = folder / f"layer0-step-{summoned.step}.safetensors"
        _heading("Save it and read it back", f"paramd summon '{LAYER}' -f {path.name}")
        _save_and_compare(summoned, path)
        _heading("Gradients, as updates consume them", f"paramd grads '{GRADIENTS}'")
        _gradients(mesh)
        _heading("Edit four rows on all ranks at one step", f"paramd edit '{ROWS}' --mul 0.5")
        _edit_and_undo(mesh)
        _heading("Pause, change weights in place, resume", f"mesh.summon('{ROWS}', writeback=True)")
        _write_back(mesh)
        _heading("Take a checkpoint now", f"paramd export {DESTINATION}/now --wait")
        _export(mesh, training.checkpoints)


def _wait_until_well(mesh: Mesh, training: Training) -> None:
    """Wait until every rank is healthy and the first updates are done."""
    deadline_s = time.monotonic() + OPEN_TIMEOUT_S
    while True:
        found = mesh.status()
        if found.step >= FIRST_STEPS and not any(row.reason for row in found):
            return
        training.check(deadline_s, "its ranks were not all reachable")
        time.sleep(0.2)


def _list_params(mesh: Mesh) -> None:
    found = mesh.params("*")
    shown = [
        info for info in found if not info.name.startswith("layers.") or "layers.0" in info.name
    ]
    rows = [tensors.param_row(info) for info in shown]
    emit(Listing(name="params", rows=rows, columns=tensors.PARAM_COLUMNS, about={}), Format.TABLE)
    hidden = len(found) - len(shown)
    _note(f"and {hidden} more like them; {sum(info.numel for info in found):,} elements in total")


def _watch(mesh: Mesh, training: Training) -> Summoned:
    print(f"{'STEP':>6}  {'LOSS':>7}  {'NORM OF ' + WEIGHT:>26}  {'MOVED BY':>9}  {'TOOK':>7}")
    mesh.summon(WEIGHT)  # loads torch, which column TOOK must not include
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
    from safetensors.torch import save_file

    save_file(found.state_dict(), path, metadata={"paramd_step": str(found.step)})
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        names = set(opened.keys())
        wrong = [name for name in found if not found[name].equal(opened.get_tensor(name))]
    if wrong or names != found.keys() or metadata["paramd_step"] != str(found.step):
        raise DataLossError(f"the file differs from the summoned tensors: {wrong or names}")
    print(
        f"{path.name}: {size(path.stat().st_size)}, step {metadata['paramd_step']}; the "
        f"safetensors library reads {len(names)} tensors, all equal to the summoned ones"
    )


def _next_steps(job: str, *, running: bool) -> None:
    _heading("Next steps", "")
    if not running:
        _note("paramd demo --keep        keeps the training running; then, in another terminal:")
    for line in (
        f"paramd status --job {job}",
        f"paramd dashboard --job {job}",
        f"paramd params 'layers.*.weight' --job {job} -o name",
        f"paramd stats '*' --job {job} -o json",
        f"paramd summon '*' -f model.safetensors --job {job}",
        f"paramd grads 'layers.0.*' --job {job}",
        f"paramd edit 'layers.0.norm1.*' --mul 0.9 --dry-run --job {job}",
        f"paramd pause --job {job}; paramd step 3 --job {job}; paramd resume --job {job}",
        f"python -c \"import paramd; print(paramd.connect(job='{job}').summon('head.*'))\"",
    ):
        _note(f"  {line}")


def _keep(training: Training) -> None:
    url = read_endpoint(training.job).url
    _note(f"Dashboard: {url}   (paramd dashboard --job {training.job} opens it, signed in)")
    _note("Training continues; Ctrl-C stops it.")
    try:
        training.wait()
    except KeyboardInterrupt:
        _note("Stopping after the next step ...")
    else:
        training.check(math.inf, "it ended")


def _heading(text: str, command: str) -> None:
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


class Demo(CommandPart):
    """A tour."""

    name = "demo"

    def add_to(self, commands: Commands) -> None:
        commands.add(RUN, demo, "", "--keep")
