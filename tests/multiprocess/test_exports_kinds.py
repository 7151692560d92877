"""Exports of real trainings: every kind of model, read by torch's and Hugging Face's readers."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, run_ranks, start_ranks
from tests.longer import sample
from tests.multiprocess.truth import Tensors, assert_same_bytes, connect_to, read_truth, wait_until

RESUME = "tests.multiprocess.workers.export_resume"


def environment(root: Path) -> dict[str, str]:
    root.mkdir()
    return {"PARAMD_DESTINATIONS": json.dumps({"here": str(root)})}


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_every_kind_is_exported_as_torch_gathers_it(tmp_path: Path) -> None:
    root = tmp_path / "out"
    with start_ranks(
        "tests.multiprocess.workers.composite",
        2,
        args=["--folder", str(tmp_path)],
        env=environment(root),
    ) as ranks:
        path = tmp_path / "composite.truth"
        wait_until(
            lambda: path.exists() or any(r.process.poll() is not None for r in ranks),
            "the truth is written",
            timeout_s=180,
        )
        step, truth = read_truth(path)
        with connect_to(ranks.state_dir, "composite") as mesh:
            export(mesh, "here/st", max_shard_size="4KB", tied="keep")
            export(mesh, "here/dcp", format="dcp")
        (tmp_path / "composite.checked").touch()
        ranks.end_well(180)
    assert sorted(os.listdir(root)) == ["dcp", "st"]
    found: dict[str, torch.Tensor] = {}
    for file in (root / "st").glob("model-*.safetensors"):
        found |= load_file(file)
    assert_same_bytes(found, truth)
    assert_same_bytes(load_dcp(root / "dcp", truth), truth)
    # And by another world than the one that trained: each of its ranks takes its own shard.
    told = run_ranks(
        "tests.multiprocess.workers.dcp_reader",
        3,
        args=["--checkpoint", str(root / "dcp"), "--truth", str(path)],
        timeout_s=180,
    )
    assert all(f"equal in {len(truth)} tensors" in one.stdout for one in told), told
    for folder in ("st", "dcp"):
        manifest = json.loads((root / folder / "paramd-export.json").read_text())
        assert manifest["step"] == step


def export(mesh: Mesh, where: str, **options: object) -> None:
    done = mesh.export(where, include=["parameters"], **options)  # type: ignore[arg-type]
    done.wait(timeout=90)


def load_dcp(folder: Path, like: Tensors) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load({"model": state}, checkpoint_id=str(folder), no_dist=True)
    return state


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", sample(["fsdp2", "fsdp1-full-orig", "tp-fsdp2"], ["tp-fsdp2"]))
def test_a_training_resumes_from_what_was_exported_while_it_ran(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "out"
    with start_ranks(
        RESUME, 2, args=["--kind", kind, "--folder", str(tmp_path)], env=environment(root)
    ) as ranks:
        exported(ranks, tmp_path)
        (tmp_path / "stop").touch()
        ranks.end_well(180)
        assert "resumed" in ranks[0].stdout


def exported(ranks: Ranks, folder: Path) -> None:
    endpoint = ranks.state_dir / "resume" / "endpoint.json"
    wait_until(
        lambda: endpoint.exists() or any(r.process.poll() is not None for r in ranks),
        "the job is there",
        timeout_s=180,
    )
    with connect_to(ranks.state_dir, "resume") as mesh:
        wait_until(lambda: mesh.status().step >= 2, "it trains")
        include = ["parameters", "buffers", "optimizer"]
        done = mesh.export("here/ckpt", format="dcp", include=include).wait(timeout=90)
        assert done.missing == ("opaque._extra_state",)
        done = mesh.export("here/hub", dtype="float16").wait(timeout=90)
    hub = folder / "out" / "hub"
    step, manifest = done.step, json.loads((hub / "paramd-export.json").read_text())
    assert manifest["missing"] == {
        "opaque._extra_state": "it is a tuple that is neither a tensor nor JSON"
    }
    assert manifest["extra_state"] == ["noted._extra_state", "told._extra_state"]
    noted = {"step": step, "of": [step / 3, None, "ä"]}
    assert json.loads((hub / "extra_state.json").read_text()) == {"noted._extra_state": noted}
    told = load_file(hub / "model.safetensors")["told._extra_state"]
    assert torch.equal(told, torch.full((step % 3,), float(step), dtype=torch.float64))
