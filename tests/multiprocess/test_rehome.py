"""Training in an arena equals training outside, bit for bit, for every kind of model."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.multiprocess.kinds import kinds_for, sampled


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [2])
def test_training_in_an_arena_is_bit_identical_and_readable_at_every_step(world_size: int) -> None:
    kinds = sampled([kind.name for kind in kinds_for(world_size)], 2)
    results = run_ranks("tests.multiprocess.rehome_worker", world_size, args=kinds, timeout_s=170)

    expected = [f"ok {kind}" for kind in kinds]
    for result in results:
        passed = [" ".join(line.split()[:2]) for line in result.stdout.splitlines()]
        assert passed == expected, f"rank {result.rank}"


def test_parameters_that_leave_the_arena_are_noticed_and_taken_back() -> None:
    results = run_ranks("tests.multiprocess.rehome_departures_worker", 2, timeout_s=60)

    for result in results:
        assert result.stdout.split() == ["assign", "data", "untied"], f"rank {result.rank}"
