"""Shardings beyond DDP, FSDP and tensor parallelism: pipelines, experts, DeepSpeed's partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.longer import sample

WORKER = "tests.multiprocess.workers.shardings"

MODULES = ["gpipe", "1f1b", "experts"]
ZERO = ["zero1", "zero1-bf16", "zero2", "zero2-bf16", "zero3", "zero3-bf16"]


@pytest.mark.parametrize("case", sample([*MODULES, *ZERO], ["1f1b", "zero2-bf16", "zero3"]))
def test_training_is_the_same_and_every_value_is_that_of_its_step(
    case: str, tmp_path: Path
) -> None:
    """Read, paused, edited and exported by another program meanwhile."""
    if case.startswith("zero"):
        pytest.importorskip("deepspeed")
    results = run_ranks(WORKER, 2, args=[case, "--folder", str(tmp_path)], timeout_s=100)
    assert all("the same after" in result.stdout for result in results)


def test_what_cannot_be_served_is_refused_by_name_and_leaves_the_training_alone(
    tmp_path: Path,
) -> None:
    pytest.importorskip("deepspeed")
    results = run_ranks(WORKER, 2, args=["refused", "--folder", str(tmp_path)], timeout_s=100)
    assert all("all refused" in result.stdout for result in results)
