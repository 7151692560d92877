"""Edits, holds and steps of real trainings, agreed by their ranks alone."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks


@pytest.mark.timeout(120)
def test_a_training_that_is_edited_held_and_stepped_computes_the_same() -> None:
    results = run_ranks(
        "tests.multiprocess.workers.acting",
        2,
        timeout_s=100,
        args=["--kinds", "ddp,fsdp1-full,fsdp2"],
    )
    for result in results:
        assert result.stdout.count('"ok"') == 3, result.stdout
