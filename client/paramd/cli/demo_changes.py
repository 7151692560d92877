"""The second half of `paramd demo`: gradients, an edit and its undo, a hold, a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paramd.cli.output import seconds, size
from paramd.cli.training import DESTINATION
from paramd.errors import DataLossError

if TYPE_CHECKING:
    from paramd.mesh.mesh import Mesh

Heading = Callable[[str, str], None]

GRADIENTS = "layers.*.up.weight"
ROWS = "layers.0.up.weight[0:4]"
FRAMES = 4


def show(mesh: Mesh, checkpoints: Path, heading: Heading) -> None:
    """Runs all of it against a training that goes on.

    Raises:
        DataLossError: the running training does not hold what it was told to.
    """
    heading("Gradients, as updates consume them", f"paramd grads '{GRADIENTS}'")
    _gradients(mesh)
    heading("Four rows edited on all ranks at one step", f"paramd edit '{ROWS}' --mul 0.5")
    _edit_and_undo(mesh)
    heading("Training held, changed in place, let go", f"mesh.summon('{ROWS}', writeback=True)")
    _write_back(mesh)
    heading("A checkpoint of the run, taken now", f"paramd export {DESTINATION}/now --wait")
    _export(mesh, checkpoints)


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
    print(f"edit {edit.id[:8]}: {edit.state} at step {edit.step}; training stood "
          f"{seconds((edit.stop_ms or 0.0) / 1e3)}")  # fmt: skip
    undo = mesh.undo(edit.id)
    print(f"edit {undo.id[:8]}: {undo.state} at step {undo.step}, which undoes {edit.id[:8]}")


def _write_back(mesh: Mesh) -> None:
    with mesh.summon(ROWS, writeback=True, note="demo") as params:
        (rows,) = params.values()
        rows.clamp_(-0.05, 0.05)
    edit = mesh.edits(limit=1)[0]
    if edit.step != params.step:
        raise DataLossError(f"the write-back was applied at {edit.step}, not at {params.step}")
    print(f"held at step {params.step}; edit {edit.id[:8]}: {edit.state} at step {edit.step}")


def _export(mesh: Mesh, checkpoints: Path) -> None:
    from safetensors import safe_open

    export = mesh.export(f"{DESTINATION}/now").wait()
    path = checkpoints / "now" / "model.safetensors"
    with safe_open(path, framework="pt") as opened:
        names = set(opened.keys())
    missing = {info.fqn for info in mesh.params()} - names
    if missing:
        raise DataLossError(f"the checkpoint lacks {sorted(missing)[:3]}")
    print(
        f"{path.name}: {size(path.stat().st_size)}, step {export.step}, {len(names)} tensors, as "
        "the safetensors library reads it"
    )
