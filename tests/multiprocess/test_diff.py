"""Two states of a running job compared, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paramd.errors import ConflictError, DeadlineError, NotFoundError, UsageError
from paramd.mesh.mesh import Mesh
from tests.launch import start_ranks
from tests.multiprocess.truth import connect_to, wait_until

WORKER = "tests.multiprocess.workers.stuck"
NAMES = {"weight", "bias"}


@pytest.mark.timeout(180)
def test_states_of_a_running_job_are_compared(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with start_ranks(WORKER, 2, args=[str(tmp_path)], state_dir=state_dir) as ranks:
        try:
            ranks.wait_for_text("trains", rank=0)
            with connect_to(state_dir, "stuck") as mesh:
                wait_until(lambda: step_of(mesh) > 3, "it trains")
                steps_to_come(mesh)
                disk_and_memory(mesh, tmp_path)
            (tmp_path / "end").touch()
            assert [one.returncode for one in ranks.wait(timeout_s=40.0)] == [0, 0]
        except BaseException:
            print(ranks.outputs())
            raise


def step_of(mesh: Mesh) -> int:
    return min(row.step for row in mesh.status())


def steps_to_come(mesh: Mesh) -> None:
    step = step_of(mesh) + 100
    found = mesh.diff(step, step + 3)
    assert found.a.startswith(f"step {step} of ")
    assert found.b.startswith(f"step {step + 3} of ")
    assert {row.name for row in found} == NAMES
    assert all(0 < row.norm < row.norm_a for row in found)
    assert all(row.cosine > 0.99 for row in found)
    ahead = mesh.diff("+1", "+4", "we*", cells=2)
    first, last = (int(label.split()[1]) for label in (ahead.a, ahead.b))
    assert (last - first, len(ahead)) == (3, 1)
    assert len(ahead[0].cells) == 2
    assert mesh.diff("now", "+2").b.startswith("step ")
    for wrong in (("+4", "+4"), ("mark:", "now")):
        with pytest.raises(UsageError):
            mesh.diff(*wrong)
    with pytest.raises(ConflictError, match="keeps none of that name; paramd marks"):
        mesh.diff("mark:nobody")
    with pytest.raises(ConflictError, match=r"step 1 is past.*checkpoint"):
        mesh.diff(1)
    for never in ((step_of(mesh) + 10**6, "now"), ("now", step_of(mesh) + 10**6)):
        with pytest.raises(DeadlineError, match=r"did not come within .* the ranks are at step"):
            mesh.diff(*never, timeout=3.0)


def disk_and_memory(mesh: Mesh, folder: Path) -> None:
    rest = mesh._run(mesh._mesh._rest.send("GET", "/jobs/stuck/updates?filter=we*", timeout_s=40))
    assert [(row["name"], row["numel"]) for row in rest["updates"]] == [("weight", 16)]
    mesh.pause()
    over_rest(mesh)
    held = mesh.summon("*")
    changed = {name: tensor.clone() for name, tensor in held.items()}
    changed["weight"][2] += 0.5
    changed["extra"] = torch.ones(3)
    save_file(changed, folder / "model.safetensors")
    assert [row.changed for row in mesh.diff(held)] == [0, 0]
    found = {row.name: row for row in mesh.diff(str(folder / "model.safetensors"), held)}
    assert found["bias"].changed == 0
    assert found["weight"].changed == 4
    assert found["weight"].norm == pytest.approx(1.0, abs=1e-5)
    assert [row for row, _ in found["weight"].largest_rows] == [2]
    assert found["extra"].problem.startswith("only ")
    assert [row.name for row in mesh.diff(folder / "model.safetensors", "now", "we*")] == ["weight"]
    assert [row.changed for row in mesh.diff(mesh)] == [0, 0]
    with pytest.raises(NotFoundError):
        mesh.diff(folder / "gone")
    mesh.resume()


def over_rest(mesh: Mesh) -> None:
    """As the page asks, while training is held."""

    def ask(query: str) -> Any:
        return mesh._run(mesh._mesh._rest.send("GET", f"/jobs/stuck/diff?{query}", timeout_s=90))

    same = ask("a=now&b=job:stuck")
    assert same["a"] == same["b"]
    assert {row["name"]: row["changed"] for row in same["tensors"]} == dict.fromkeys(NAMES, 0)
    with pytest.raises(NotFoundError, match="'other' is not served here"):
        ask("a=job:other")
    with pytest.raises(UsageError, match="expected now, "):
        ask("a=/etc/passwd")
