"""The partitions of DeepSpeed's and Megatron-Core's optimizers."""

from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.longer import sample, takes_all
from tests.sequences.chosen import LONGEST_S, check
from tests.sequences.model import PARTITIONED

WORKER = "tests.multiprocess.workers.shardings"
MEGATRON = "tests.multiprocess.workers.megatron"

ZERO = ["zero1", "zero1-bf16", "zero2", "zero2-bf16", "zero3", "zero3-bf16"]
BUFFERS = [("fp32", 2), ("fp16", 2), ("plain-bf16", 2), ("tp-plain-fp32", 2), ("tp-bf16", 4)]


@pytest.mark.parametrize("case", sample(ZERO, ["zero2-bf16"]))
def test_deepspeeds_training_is_the_same_and_every_value_is_that_of_its_step(
    case: str, tmp_path: Path
) -> None:
    """Read, paused, edited and exported by another program meanwhile."""
    results = run_ranks(WORKER, 2, args=[case, "--folder", str(tmp_path)], timeout_s=100)
    assert all("the same after" in result.stdout for result in results)


@pytest.mark.parametrize(("case", "ranks"), sample(BUFFERS, [("tp-bf16", 4)]))
def test_megatrons_training_is_the_same_and_every_value_is_that_of_its_step(
    case: str, ranks: int, tmp_path: Path
) -> None:
    """The same; on four ranks both tensor and data parallel."""
    results = run_ranks(MEGATRON, ranks, args=[case, "--folder", str(tmp_path)], timeout_s=100)
    assert all("the same after" in result.stdout for result in results)


@pytest.mark.parametrize("worker", sample([WORKER, MEGATRON], [MEGATRON]))
def test_what_cannot_be_served_is_refused_by_name_and_leaves_the_training_alone(
    worker: str, tmp_path: Path
) -> None:
    results = run_ranks(worker, 2, args=["refused", "--folder", str(tmp_path)], timeout_s=100)
    assert all("all refused" in result.stdout for result in results)


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("kind", PARTITIONED)
def test_every_answer_of_a_random_sequence_is_what_it_says(kind: str) -> None:
    check(kind, 10 if takes_all() else 0.5)
