"""Shardings beyond DDP, FSDP and tensor parallelism: pipelines, experts, DeepSpeed's partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks

WORKER = "tests.multiprocess.workers.shardings"


@pytest.mark.parametrize("case", ["gpipe", "1f1b", "experts"])
def test_ranks_with_different_modules_are_one_mesh_and_train_the_same(
    case: str, tmp_path: Path
) -> None:
    results = run_ranks(WORKER, 2, args=[case, "--folder", str(tmp_path)], timeout_s=100)
    assert all("the same after" in result.stdout for result in results)
