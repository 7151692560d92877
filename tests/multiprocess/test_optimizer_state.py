"""Optimizer state read from outside: every bit is the trainer's, wherever it lies."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paramd.mesh.mesh import Mesh
from paramd.mesh.results import OptimizerState
from tests.launch import Ranks, start_ranks
from tests.longer import sample, share
from tests.multiprocess.truth import connect_to, wait_until
from tests.multiprocess.workers.optimizer_state import digest

WORKER = "tests.multiprocess.workers.optimizer_state"
JOB = "states"


@contextmanager
def training(folder: Path, *options: str, ends: bool = True) -> Iterator[tuple[Mesh, Ranks]]:
    """Two ranks that train; they end when the block does."""
    state_dir, out = folder / "state", folder / "out"
    out.mkdir()
    environment = {"PARAMD_DESTINATIONS": json.dumps({"here": str(out)}), "PARAMD_LINGER_S": "60"}
    with start_ranks(
        WORKER, 2, args=[str(folder), *options], state_dir=state_dir, env=environment
    ) as ranks:
        try:
            wait_until((folder / "truth-3").exists, "it trains")
            with connect_to(state_dir, JOB) as mesh:
                yield mesh, ranks
            if ends:
                (folder / "end").touch()
                assert [one.returncode for one in ranks.wait(timeout_s=60.0)] == [0, 0]
        except BaseException:
            print(ranks.outputs())
            raise


def hanging(folder: Path) -> None:
    """Wait until every rank hangs in a forward pass, its step settled."""
    (folder / "hang").touch()
    wait_until(lambda: all((folder / f"hangs-{rank}").exists() for rank in range(2)), "they hang")


def truth(folder: Path, step: int) -> dict[str, dict[str, Any]]:
    path = folder / f"truth-{step}"
    wait_until(path.exists, f"the truth of step {step}")
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return found


def assert_told(state: OptimizerState, known: dict[str, dict[str, Any]]) -> None:
    """Every bit is the trainer's; the optimizer knows tied parameters by one name, we by each."""
    found = {
        name: {
            key: digest(value) if isinstance(value, torch.Tensor) else value
            for key, value in one.items()
        }
        for name, one in state.items()
    }
    told = {name: {key: v for key, v in one.items() if key} for name, one in known.items()}
    for name, of in found.items():
        if known[name][""] == digest(torch.empty(0)):
            assert of == {}, name  # nobody holds any part of it
            continue
        tied = [n for n in told if told[n] and known[n][""] == known[name][""]]
        assert of == told[name] or of in [told[n] for n in tied if not told[name]], name
    assert set(found) == set(told)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("options", share([("--resume", "auto"), ("--not-given",)], 2))
def test_it_lies_there_with_resume_and_for_optimizers_that_attach_was_not_given(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A reader has it recorded where a successor would not.
    monkeypatch.setenv("PARAMD_KEEP_EVERY", "1000000")
    with training(tmp_path, *options) as (mesh, _):
        found = mesh.summon("*", optimizer=True, timeout=60.0)
        assert found.optimizer is not None
        assert found.step > 0
        known = truth(tmp_path, found.step)
        assert_told(found.optimizer, known)
        assert all(digest(tensor) == known[name][""] for name, tensor in found.items())


@pytest.mark.in_turns
@pytest.mark.timeout(180)
@pytest.mark.parametrize("optimizer", sample(["sgd", "momentum"], ["sgd"]))
def test_state_without_tensors_is_no_obstacle(optimizer: str, tmp_path: Path) -> None:
    with training(tmp_path, "--optimizer", optimizer) as (mesh, _):
        found = mesh.optimizer()
        assert_told(found, truth(tmp_path, found.step))
        assert {key for one in found.values() for key in one} == (
            {"momentum_buffer"} if optimizer == "momentum" else set()
        )


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_state_that_each_rank_has_a_part_of_is_gathered_from_who_has_it(tmp_path: Path) -> None:
    with training(tmp_path, "--kind", "ddp", "--optimizer", "zero") as (mesh, _):
        found = mesh.optimizer()
        assert_told(found, truth(tmp_path, found.step))
        done = mesh.export("here/zero", include=["parameters", "optimizer"]).wait(timeout=60)
        assert_stored(stored_in(tmp_path / "out" / "zero"), truth(tmp_path, done.step))


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_state_of_a_training_that_hangs_and_of_one_that_died(tmp_path: Path) -> None:
    with training(tmp_path, ends=False) as (mesh, ranks):
        hanging(tmp_path)
        hung = mesh.optimizer(timeout=30.0)
        known = truth(tmp_path, hung.step)
        assert not (tmp_path / f"truth-{hung.step + 1}").exists()
        assert_told(hung, known)
        for rank in ranks:
            os.kill(rank.process.pid, signal.SIGKILL)
        wait_until(lambda: all(r.process.poll() is not None for r in ranks), "they are dead")
        died = mesh.summon("*", optimizer=True, timeout=30.0)
        assert died.step == hung.step
        assert died.optimizer is not None
        assert_told(died.optimizer, known)
        # A checkpoint of the last step, optimizer included, after every trainer is gone.
        include = ["parameters", "optimizer"]
        mesh.export("here/last", include=include).wait(timeout=60)
        assert_stored(stored_in(tmp_path / "out" / "last"), known)


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export as safetensors."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for one in files for name, tensor in one.items()}


def assert_stored(stored: dict[str, torch.Tensor], known: dict[str, dict[str, Any]]) -> None:
    """The state that an export has is the trainer's, every bit."""
    for name, state in known.items():
        for key, value in state.items():
            if key and isinstance(value, str):
                matching = [t for n, t in stored.items() if name in n and n.endswith(key)]
                assert value in [digest(t) for t in matching], (name, key, list(stored))
