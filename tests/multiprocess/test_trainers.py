"""The frameworks people train with: the real package, the same training, the right values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import ROOT, run_ranks
from tests.longer import sample

WORKER = "tests.multiprocess.workers.trainers"

HF = [
    ("hf-plain", 1),
    ("hf-accumulated", 2),
    ("hf-compiled", 1),
    ("hf-fsdp2", 2),
    ("hf-fsdp2-accumulated", 2),
    ("hf-scaled", 1),
    ("hf-from-checkpoint", 1),
    ("hf-adapters", 2),
    ("hf-layer-wise", 1),
    ("hf-raises", 1),
    ("hf-twice", 1),
    ("trl-adapters", 2),
]
ACCELERATE = [("accelerate-ddp", 2), ("accelerate-fsdp2", 2)]
PLAIN = [("two-models", 2), ("scaled", 1)]
LIGHTNING = [
    ("lightning-plain", 1),
    ("lightning-ddp", 2),
    ("lightning-model-parallel", 2),
    ("lightning-fabric", 2),
    ("lightning-scaled", 1),
    ("lightning-raises", 1),
]
TITAN = [("titan", 2), ("titan-in-backward", 2)]


EVERY = [*HF, *ACCELERATE, *PLAIN, *LIGHTNING, *TITAN]
SAMPLE = [
    ("hf-fsdp2", 2),
    ("hf-layer-wise", 1),
    ("accelerate-ddp", 2),
    ("two-models", 2),
    ("scaled", 1),
    ("lightning-model-parallel", 2),
    ("lightning-raises", 1),
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
        pytest.importorskip(needed, exc_type=ImportError)
    results = run_ranks(WORKER, world_size, args=[case, "--folder", str(tmp_path)], timeout_s=100)
    assert all("the same" in result.stdout for result in results)


@pytest.mark.parametrize("example", ["train_hf", "train_lightning"])
def test_the_example_trains_to_its_end(example: str) -> None:
    pytest.importorskip("lightning" if "lightning" in example else "transformers")
    (result,) = run_ranks(
        ROOT / "examples" / f"{example}.py", 1, args=["--steps", "3"], timeout_s=100
    )
    assert "attached at step 0" in result.stderr
