"""Training with paramd attached equals training without, and leaves nothing when it goes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paramd.mesh.mesh import Mesh
from tests.launch import Ranks, start_ranks
from tests.multiprocess.kinds import kinds_for, sampled
from tests.multiprocess.striking import logs
from tests.multiprocess.truth import assert_same_bytes, connect_to, read_truth, wait_until

WORKER = "tests.multiprocess.workers.train"

# More ranks, and every kind with another optimizer, are in test_summon_equal.py.
KINDS = sampled([kind.name for kind in kinds_for(2)], 0)
CASES = [(1, ["plain"]), *((2, KINDS[begin : begin + 7]) for begin in range(0, len(KINDS), 7))]

TRUTH_AT = 4
"""The worker's: steps of the training when it writes its truth."""

STEPS_SEEN = 2
"""Steps of the running training that a client sees."""


@pytest.mark.parametrize(("world_size", "names"), CASES, ids=lambda of: str(of)[:20])
def test_training_with_paramd_attached_is_bit_identical(
    world_size: int, names: list[str], tmp_path: Path
) -> None:
    arguments = ["--kinds", ",".join(names), "--folder", str(tmp_path)]
    with start_ranks(WORKER, world_size, args=arguments) as ranks:
        for name in names:
            try:
                visit(ranks, name, tmp_path)
            except BaseException:
                print(ranks.outputs(), logs(ranks), sep="\n")
                raise
        results = ranks.wait(timeout_s=60)
        for result in results:
            passed = [line.split()[1] for line in result.stdout.splitlines() if line[:3] == "ok "]
            assert result.returncode == 0, ranks.outputs()
            assert passed == names, ranks.outputs()
        print(results[0].stdout)
        wait_until(lambda: not ranks.stragglers(), "sidecars end", timeout_s=10)


def visit(ranks: Ranks, job: str, folder: Path) -> None:
    """One client of one job: compares at its step of truth, then watches it train."""
    truth_path = folder / f"{job}.truth"
    wait_until(lambda: truth_path.exists() or ended(ranks), f"{job} trains", timeout_s=90)
    assert truth_path.exists(), ranks.outputs()
    step, truth = read_truth(truth_path)
    with connect_to(ranks.state_dir, job) as mesh:
        found = mesh.summon("*")
        assert found.step == step
        assert_same_bytes(found, truth)
        (folder / f"{job}.checked").touch()
        watch_training(mesh, step)
        (folder / f"{job}.seen").touch()


def watch_training(mesh: Mesh, step: int) -> None:
    """Summons of a job that trains: its steps go on, its buffers belong to them."""
    steps, updates = {step}, step // TRUTH_AT
    counters = [info.name for info in mesh.params("*", buffers=True) if is_counter(info.name)]

    def another() -> bool:
        found = mesh.summon("*", *counters, buffers=True)
        assert found.step >= max(steps)
        for name in counters:
            assert found[name].item() == math.ceil(found.step / updates), f"at step {found.step}"
        steps.add(found.step)
        return len(steps) > STEPS_SEEN

    wait_until(another, "a client sees the training", timeout_s=40)


def is_counter(name: str) -> bool:
    """Buffers that count forwards: once a step, which is one update for each optimizer."""
    return name.endswith("num_batches_tracked") or name == "steps"


def ended(ranks: Ranks) -> bool:
    return any(rank.process.poll() is not None for rank in ranks)
