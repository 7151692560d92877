"""Calls that the training makes in its own loop, and would wait for itself with."""

import json
from pathlib import Path

import pytest

from tests.launch import run_ranks


@pytest.mark.in_turns
@pytest.mark.timeout(180)
def test_calls_of_the_training_itself_are_refused_at_once_and_its_export_is_made_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "out").mkdir()
    run_ranks(
        "tests.multiprocess.workers.calling_itself",
        2,
        args=["--folder", str(tmp_path)],
        env={"PARAMD_DESTINATIONS": json.dumps({"out": str(tmp_path / "out")})},
        timeout_s=150,
    )
