"""Exports of a training that goes on: every file of one step, also while parts die."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paramd
from paramd.errors import NotFoundError, ParamdError
from paramd.mesh.exports.calls import ExportInfo, ExportState
from paramd.mesh.mesh import Mesh
from tests.multiprocess.striking import allowed_s, arm, end_well, helper, stamps


def connected(state_dir: Path) -> Mesh:
    endpoint = json.loads((state_dir / "stamp" / "endpoint.json").read_text())
    return paramd.connect(endpoint["url"], endpoint["token"])


def check_one_step(folder: Path, step: int) -> int:
    """Every parameter holds the step's number in every element; how many there are."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    for name, tensor in tensors.items():
        assert bool((tensor == torch.tensor(step).to(tensor.dtype)).all()), (step, name)
    return len(tensors)


def ended(mesh: Mesh, info: ExportInfo) -> ExportInfo:
    """How an export ends, though the control plane may be away for a while."""
    deadline_s = time.monotonic() + allowed_s(40)
    while time.monotonic() < deadline_s:
        try:
            return mesh.export_ended(info, 10)
        except ParamdError:
            time.sleep(0.1)
    raise AssertionError(f"{info} does not end")


def test_a_training_is_exported_at_one_step_while_parts_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("PARAMD_DESTINATIONS", json.dumps({"checkpoints": str(out)}))
    with stamps(tmp_path) as ranks:
        with connected(ranks.state_dir) as mesh:
            count = len(mesh.params())
            steps = []
            for number in range(2):
                export = mesh.export(
                    f"checkpoints/{number}", include=("parameters",), max_shard_size=256
                )
                done = export.wait(allowed_s(30))
                assert check_one_step(out / str(number), done.step) == count
                assert {one.rank for one in done.files} == {0, 1}
                steps.append(done.step)
            assert steps == sorted(set(steps)), "training went on between them"

            # What was exported goes back into the mesh as one edit.
            mesh.pause()
            edit = mesh.restore("checkpoints/0")
            restored = mesh.summon("*")
            assert edit.note.startswith("restored checkpoints/0")
            for name, tensor in restored.items():
                assert bool((tensor == torch.tensor(steps[0]).to(tensor.dtype)).all()), name
            mesh.resume()
            with pytest.raises(NotFoundError):
                mesh.restore("checkpoints/nowhere")

            # A sidecar that dies while it writes: failed and nowhere, and the next one is whole.
            arm(tmp_path / "faults", 1, "export-chunk:kill")
            killed = mesh.export("checkpoints/killed", include=("parameters",), max_shard_size=256)
            found = ended(mesh, killed.info)
            assert (found.state, not found.reason) == (ExportState.FAILED, False)
            assert not (out / "killed").exists()

            # The control plane dies in the middle; the trainer brings it back.
            arm(tmp_path / "faults", 0, "export-chunk:stop")
            until_joined(mesh)
            export = mesh.export("checkpoints/on", include=("parameters",), max_shard_size=256)
            sidecar = helper(ranks, "sidecar", 0)
            wait_for(lambda: sidecar.status() == "stopped", "the stop")
            control = helper(ranks, "control")
            control.kill()
            sidecar.resume()
            found = ended(mesh, export.info)
            if found.state is ExportState.DONE:
                assert check_one_step(out / "on", found.step) == count
            else:
                assert found.reason
                assert not (out / "on").exists()
            until_joined(mesh)
            whole = mesh.export("checkpoints/last", include=("parameters",)).wait(allowed_s(30))
            assert check_one_step(out / "last", whole.step) == count
        hidden = [p for p in out.rglob("*") if p.name.startswith(".")]
        assert not hidden, hidden
        end_well(ranks, tmp_path)


def until_joined(mesh: Mesh) -> None:
    def joined() -> bool:
        try:
            return all(not row.reason for row in mesh.status())
        except ParamdError:
            return False

    wait_for(joined, "a whole mesh")


def wait_for(condition: object, what: str) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + allowed_s(20)
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)
