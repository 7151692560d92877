"""What a user reads of a real training that freezes some of its weights and averages others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import paramd
from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, start_ranks
from tests.multiprocess.workers.standins import Model

WORKER = "tests.multiprocess.workers.standins"


@contextmanager
def training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, world_size: int = 1, *options: str
) -> Iterator[tuple[Ranks, Mesh]]:
    arguments = ["--folder", str(folder), *options]
    with start_ranks(WORKER, world_size, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0)
        monkeypatch.setenv("PARAMD_STATE_DIR", str(ranks.state_dir))
        with paramd.connect(job="standins", timeout_s=20) as mesh:
            yield ranks, mesh
        for name in ("back", "stop"):
            (folder / name).touch()
        ended = ranks.wait(timeout_s=60)
        assert [one.returncode for one in ended] == [0] * world_size, ended


def test_what_is_summoned_loads_and_what_is_frozen_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(tmp_path, monkeypatch, 2) as (_, mesh):
        found = mesh.summon("*", buffers=True)
        plain = found.state_dict()
        assert type(plain) is dict
        assert plain["head.weight"] is plain["embed.weight"] is found["embed.weight"]
        model = Model()
        model.load_state_dict(plain, strict=True)
        assert torch.equal(model.head.weight, torch.full((8, 4), float(found.step)))
        assert torch.equal(model.state_dict()["norm.running_var"], plain["norm.running_var"])

        frozen = {"adapter.weight", "adapter.bias"}
        assert {row.fqn for row in mesh.params(trainable=False)} == frozen
        assert {row.fqn for row in mesh.params(buffers=True, trainable=True)} == {
            "embed.weight",
            "norm.weight",
            "norm.bias",
        }
        shown = {row.fqn: row.trainable for row in mesh.params(buffers=True)}
        assert shown["norm.running_mean"] is None
        assert listed("--frozen") == frozen
        assert listed("trainable=false") == frozen
        assert "embed.weight" in listed("--trainable")


def listed(*arguments: str) -> set[str]:
    ended = subprocess.run(
        [sys.executable, "-m", "paramd.cli", "params", *arguments, "-o", "json"],
        capture_output=True,
        check=True,
    )
    return {row["fqn"] for row in json.loads(ended.stdout)["params"]}
