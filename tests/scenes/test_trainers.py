"""The frameworks people train with: the real package, the same training, the right values."""

import signal
from pathlib import Path

import pytest

from tests.launch import ROOT, run_ranks, start_ranks
from tests.longer import sample

WORKER = "tests.multiprocess.workers.trainers"

HF = [
    ("hf-plain", 1), ("hf-accumulated", 2), ("hf-compiled", 1), ("hf-fsdp2", 2),
    ("hf-fsdp2-accumulated", 2), ("hf-scaled", 1), ("hf-from-checkpoint", 1), ("hf-adapters", 2),
    ("hf-layer-wise", 1), ("hf-raises", 1), ("hf-twice", 1), ("trl-adapters", 2),
]  # fmt: skip
ACCELERATE = [("accelerate-ddp", 2), ("accelerate-fsdp2", 2)]
LIGHTNING = [
    ("lightning-plain", 1),
    ("lightning-ddp", 2),
    ("lightning-model-parallel", 2),
    ("lightning-fabric", 2),
    ("lightning-scaled", 1),
    ("lightning-raises", 1),
]
TITAN = [("titan", 2), ("titan-in-backward", 2)]


EVERY = [*HF, *ACCELERATE, *LIGHTNING, *TITAN]
SAMPLE = [
    ("hf-fsdp2", 2),
    ("accelerate-ddp", 2),
    ("lightning-model-parallel", 2),
    ("titan-in-backward", 2),
]
NEEDS = {"titan": "torchtitan.components.optimizer", "lightning": "lightning"}
"""What some environments lack: torchtitan does not even import without triton."""


@pytest.mark.parametrize(("case", "world_size"), sample(EVERY, SAMPLE))
def test_training_is_the_same_and_served_at_the_steps_of_the_framework(
    case: str, world_size: int, tmp_path: Path
) -> None:
    needed = NEEDS.get(case.split("-")[0])
    if needed is not None:
        found = pytest.importorskip(needed, exc_type=ImportError)
        if case == "titan-in-backward" and not hasattr(found, "OptimizersInBackwardContainer"):
            pytest.skip("torchtitan has had no such container since 0.3")
    results = run_ranks(WORKER, world_size, args=[case, "--folder", str(tmp_path)], timeout_s=100)
    assert all("the same" in result.stdout for result in results)


EXAMPLES = [
    ("train_hf", "transformers"),
    ("train_lightning", "lightning"),
    ("train_trl", "trl"),
    ("train_accelerate", "accelerate"),
]


@pytest.mark.parametrize(("example", "needed"), sample(EXAMPLES, EXAMPLES[2:3]))
def test_the_example_trains_to_its_end(example: str, needed: str) -> None:
    pytest.importorskip(needed)
    (result,) = run_ranks(
        ROOT / "examples" / f"{example}.py", 1, args=["--steps", "3"], timeout_s=100
    )
    # A callback's user sees the job and where it is; who calls attach has both in hand.
    said = "step 3" if example == "train_accelerate" else "attached at step 0; http://127.0.0.1:"
    assert said in result.stderr + result.stdout


@pytest.mark.timeout(300)
def test_optimizers_and_adapters_of_other_packages_train_as_without_paramd() -> None:
    others = ["schedule-free", "eight-bit", "adapters"]
    results = run_ranks("tests.multiprocess.workers.combinations", 2, args=others, timeout_s=280)
    for result in results:
        assert [line.split(":")[0] for line in result.stdout.splitlines()] == others


@pytest.mark.timeout(300)
def test_a_trainer_that_was_killed_goes_on_with_the_next_batch_and_changes_no_bit(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    worker = "tests.multiprocess.workers.trainer_killed"
    folder = ["--folder", str(tmp_path)]
    (whole,) = run_ranks(worker, 1, args=folder, timeout_s=100)
    state = tmp_path / "state"
    with start_ranks(worker, 1, args=[*folder, "--at", "5"], state_dir=state) as killed:
        (first,) = killed.wait(timeout_s=100)
        assert first.returncode == -signal.SIGKILL
        with start_ranks(worker, 1, args=folder, state_dir=state) as again:
            (second,) = again.wait(timeout_s=100)
    assert "attached at step 5" in second.stderr
    last = whole.stdout.splitlines()[-1]
    assert second.stdout.splitlines()[-1] == last
    assert "[" in last, "digest and learning rate"
