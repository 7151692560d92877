"""Parameters on a CUDA device, mirrored: the stamp test, edits, gradients, bit-identity.

`make test-gpu`. Skipped where there is no device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import paramd
from paramd.mesh.edits.calls import EditState
from paramd.mesh.mesh import Mesh
from tests.gpu.worker import DEVICE, JOB, MODULUS
from tests.launch import Ranks, run_ranks, start_ranks
from tests.multiprocess.truth import connect_to, wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device here"
    ),
]

WORKER = "tests.gpu.worker"
WRAPS = [("plain", 1), ("ddp", 2), ("fsdp2", 1)]
READS = 40
STEPS = 400


@contextmanager
def training(folder: Path, mode: str, wrap: str, world_size: int) -> Iterator[tuple[Ranks, Mesh]]:
    """Trains until the block ends; then every rank must end well by itself."""
    stop = folder / "stop"
    arguments = ["--mode", mode, "--wrap", wrap, "--stop", str(stop)]
    with start_ranks(WORKER, world_size, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0, timeout_s=90)
        try:
            with connect_to(ranks.state_dir, JOB) as mesh:
                wait_until(lambda: mesh.status().step > 0, "it trains")
                yield ranks, mesh
        finally:
            stop.touch()
        ranks.end_well(90)


def assert_all(found: paramd.mesh.results.Summoned, value: float) -> None:
    wrong = {n: t.unique()[:4].tolist() for n, t in found.items() if not bool((t == value).all())}
    assert not wrong, f"step {found.step}: {wrong}"


@pytest.mark.parametrize(("wrap", "world_size"), WRAPS)
def test_every_value_equals_the_step_the_answer_carries(
    wrap: str, world_size: int, tmp_path: Path
) -> None:
    steps = set()
    with training(tmp_path, "stamp", wrap, world_size) as (ranks, mesh):
        for index in range(READS):
            found = mesh.summon("*" if index % 2 else "*weight")
            assert_all(found, found.step)
            steps.add(found.step)
        table = mesh.stats("*")
        assert {(row.summary.min, row.summary.max) for row in table} == {(table.step,) * 2}
        print(ranks.outputs())
    assert len(steps) > READS // 4


@pytest.mark.parametrize(("wrap", "world_size"), WRAPS)
def test_edits_reach_the_device_and_survive_updates(
    wrap: str, world_size: int, tmp_path: Path
) -> None:
    with training(tmp_path, "frozen", wrap, world_size) as (_, mesh):
        for value in range(1, 5):
            if value % 2:
                edit = mesh.edit("*", fill=float(value), timeout=60)
            else:
                tensors = {i.name: torch.full(i.shape, float(value)) for i in mesh.params("*")}
                edit = mesh.edit(set=tensors, timeout=60)
            assert edit.state is EditState.APPLIED
            found = mesh.summon("*")
            assert found.step > edit.step or found.edits >= value
            assert_all(found, value)
        mesh.undo(edit.id, timeout=60)
        assert_all(mesh.summon("*"), 3)


@pytest.mark.parametrize(("wrap", "world_size"), WRAPS)
def test_gradients_are_whole_and_of_their_update(
    wrap: str, world_size: int, tmp_path: Path
) -> None:
    with training(tmp_path, "gradients", wrap, world_size) as (_, mesh):
        for seen, frame in enumerate(mesh.grads("*"), start=1):
            for name, value in frame.items():
                assert value is not None, name
                assert bool((value == frame.step % MODULUS).all()), f"{frame.step}: {name}"
            if seen == READS:
                break


def test_training_is_bit_identical_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    arguments = ["--mode", "train", "--steps", str(STEPS)]
    bare = run_ranks(WORKER, 1, args=[*arguments, "--bare"], timeout_s=120)[0]
    with start_ranks(WORKER, 1, args=arguments) as ranks:
        ranks.wait_for_text("attached", rank=0, timeout_s=90)
        with connect_to(ranks.state_dir, JOB) as mesh:
            for _ in range(5):
                mesh.summon("*", buffers=True)
        read = ranks.wait(timeout_s=120)[0]
    assert read.returncode == bare.returncode == 0, read.stderr
    assert held(read.stdout) == held(bare.stdout)


def held(text: str) -> str:
    return text.rpartition("holds ")[2].split()[0]
