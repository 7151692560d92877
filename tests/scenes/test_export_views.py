"""Exports, downloads and frames of running trainings that are not the parameters as they are:
adapters, merged models and averages, compared bit by bit with the trainings' own at that step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from paramd.errors import ConflictError, UsageError
from paramd.mesh.mesh import Mesh
from tests.launch import start_ranks
from tests.multiprocess.truth import assert_same_bytes, connect_to, wait_until
from tests.multiprocess.workers.views import Net, adapted

WORKER = "tests.multiprocess.workers.views"
Truth = Mapping[int, dict[str, torch.Tensor]]


@contextmanager
def training(case: str, folder: Path) -> Iterator[tuple[Mesh, Path]]:
    """A mesh of the running training, and the folder of its exports; then its `truth.pt`."""
    root = folder / "out"
    root.mkdir()
    given = {"PARAMD_DESTINATIONS": json.dumps({"here": str(root)})}
    args = [case, "--folder", str(folder)]
    with start_ranks(WORKER, 2, args=args, env=given) as ranks:
        endpoint = ranks.state_dir / "views" / "endpoint.json"
        wait_until(
            lambda: endpoint.exists() or any(r.process.poll() is not None for r in ranks),
            "the job is there",
            timeout_s=120,
        )
        with connect_to(ranks.state_dir, "views") as mesh:
            wait_until(lambda: mesh.status().step >= 2, "it trains")
            yield mesh, root
        (folder / "stop").touch()
        ranks.end_well(120)


def read_truth(folder: Path) -> Truth:
    found: Truth = torch.load(folder / "truth.pt", weights_only=True)
    return found


def part(state: Mapping[str, torch.Tensor], head: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(head): one for n, one in state.items() if n.startswith(head)}


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_exported_downloaded_and_followed_as_peft_has_it(tmp_path: Path) -> None:
    with training("adapters", tmp_path) as (mesh, root):
        adapter = mesh.export("here/adapter", format="peft").wait(timeout=90)
        merged = mesh.export("here/merged", merge=True).wait(timeout=90)
        got = mesh.download(tmp_path / "got.safetensors", merge=True, name_map={"u*": "new.u*"})
        frames = list(islice(mesh.follow("*", merge=True), 3))
        with pytest.raises(ConflictError, match="adapter: there is no 'x'; this training"):
            mesh.export("here/none", format="peft", adapter="x").wait(timeout=60)
        with pytest.raises(UsageError, match="leave it out"):
            mesh.export("here/none", format="peft", include=["parameters", "optimizer"])
    steps = read_truth(tmp_path)
    theirs: Any = at(steps[adapter.step])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = root / "adapter"
    assert_same_bytes(
        load_file(ours / "adapter_model.safetensors"),
        load_file(tmp_path / "theirs" / "adapter_model.safetensors"),
    )
    config, expected_config = map(config_of, (ours, tmp_path / "theirs"))
    assert config == expected_config
    assert_same_bytes(load_file(root / "merged" / "model.safetensors"), whole(steps[merged.step]))

    expected = {n: one for n, one in whole(steps[got.step]).items() if n in dict(names())}
    renamed = {f"new.{n}" if n.startswith("u") else n: one for n, one in expected.items()}
    assert_same_bytes(load_file(got.path), renamed)
    assert [frame.step for frame in frames] == sorted({frame.step for frame in frames})
    for frame in frames:
        expected = {n: one for n, one in whole(steps[frame.step]).items() if n in dict(names())}
        assert_same_bytes(dict(frame), expected)
    # The base is frozen: what has neither an adapter nor a copy to train is the same object.
    assert frames[1]["embed.weight"] is frames[0]["embed.weight"]
    assert sorted(frames[1].changed) == ["down.weight", "head.bias", "head.weight", "up.weight"]


def config_of(folder: Path) -> dict[str, Any]:
    """Sets have an order in each process, and the training's script is its own main module."""
    found = json.loads((folder / "adapter_config.json").read_text())
    assert found.pop("auto_mapping")["base_model_class"] == "Net"
    return {key: sorted(one) if isinstance(one, list) else one for key, one in found.items()}


def names() -> Iterator[tuple[str, object]]:
    return Net().named_parameters()


def at(state: Mapping[str, torch.Tensor]) -> Any:
    model = adapted()
    model.load_state_dict(state)
    return model


def whole(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = at(state).merge_and_unload().state_dict()
    return found


@pytest.mark.timeout(240)
def test_averaged_weights_are_exported_as_a_model_by_their_name(tmp_path: Path) -> None:
    with training("averages", tmp_path) as (mesh, root):
        model = mesh.export("here/model", weights_from="swa").wait(timeout=90)
        net = mesh.export("here/net", weights_from="net").wait(timeout=90)
        kept = mesh.export("here/kept", weights_from="ema", names=["net.*"]).wait(timeout=90)
        with pytest.raises(ConflictError, match="no model of this training, and no state"):
            mesh.export("here/none", weights_from="avg").wait(timeout=60)
        with pytest.raises(UsageError, match="leave it out"):
            mesh.export("here/none", weights_from="ema", include=["parameters", "optimizer"])
    steps = read_truth(tmp_path)
    ours = {key: load_file(root / key / "model.safetensors") for key in ("model", "net", "kept")}
    assert_same_bytes(ours["model"], part(steps[model.step], "swa.module."))
    Net().load_state_dict(ours["model"])
    assert_same_bytes(ours["net"], part(steps[net.step], "net."))
    # The embedding is frozen, so it is its own average; so are buffers.
    expected = part(steps[kept.step], "net.") | part(steps[kept.step], "state.")
    assert_same_bytes(ours["kept"], {f"net.{name}": one for name, one in expected.items()})
    assert not torch.equal(expected["up.weight"], steps[kept.step]["net.up.weight"])
    manifest = json.loads((root / "kept" / "paramd-export.json").read_text())
    assert (manifest["weights_from"], manifest["step"]) == ("ema", kept.step)


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_an_optimizer_averages_is_exported_by_the_states_name(tmp_path: Path) -> None:
    with training("schedule-free", tmp_path) as (mesh, root):
        found = mesh.export("here/x", weights_from="schedule-free").wait(timeout=90)
        as_dcp = mesh.export("here/dcp", weights_from="schedule-free", format="dcp")
        z = mesh.export("here/z", weights_from="z").wait(timeout=90)
        dcp_info = as_dcp.wait(timeout=90)
    steps = read_truth(tmp_path)
    assert_same_bytes(load_file(root / "x" / "model.safetensors"), averaged(steps[found.step]))
    state = {n: torch.zeros_like(one) for n, one in averaged(steps[dcp_info.step]).items()}
    dcp.load({"model": state}, checkpoint_id=str(root / "dcp"), no_dist=True)
    assert_same_bytes(state, averaged(steps[dcp_info.step]))
    with safe_open(root / "z" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(averaged(steps[z.step]))


def averaged(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model as after `optimizer.eval()`."""
    own = {name: one for name, one in state.items() if not name.startswith("state.")}
    return {**own, **part(state, "state.")}
