"""Pipelines and experts."""

from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.longer import sample

WORKER = "tests.multiprocess.workers.shardings"


@pytest.mark.parametrize("case", sample(["gpipe", "1f1b", "experts"], ["1f1b"]))
def test_training_is_the_same_and_every_value_is_that_of_its_step(
    case: str, tmp_path: Path
) -> None:
    """Read, paused, edited and exported by another program meanwhile."""
    results = run_ranks(WORKER, 2, args=[case, "--folder", str(tmp_path)], timeout_s=100)
    assert all("the same after" in result.stdout for result in results)
