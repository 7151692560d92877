"""Parameters that leave their arena while they train."""

from __future__ import annotations

from tests.launch import run_ranks


def test_parameters_that_leave_the_arena_are_noticed_and_taken_back() -> None:
    results = run_ranks("tests.multiprocess.rehome_departures_worker", 2, timeout_s=60)

    for result in results:
        assert result.stdout.split() == ["assign", "data", "untied"], f"rank {result.rank}"
