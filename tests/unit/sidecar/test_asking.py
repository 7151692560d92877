"""Ranks that ask their trainers for optimizer state come to do so at the same boundary."""

import pytest

from paramd_service.sidecar.snapshots.moments import MISSES, WAITS, Asking


@pytest.mark.parametrize("ahead", range(MISSES + WAITS + 1))
def test_ranks_out_of_step_have_the_state_at_one_boundary(ahead: int) -> None:
    """The first rank counted misses alone before; a state counts only if both ranks have it."""
    ranks = [Asking(), Asking()]

    def boundary(rank: Asking) -> bool:
        captured = rank.asks()  # what is not recorded cannot be had without the trainer
        rank.ended(captured=captured, missed=not captured)
        return captured

    for _ in range(ahead):
        boundary(ranks[0])
    attempts = [tuple(map(boundary, ranks)) for _ in range(MISSES + WAITS)]
    assert (True, True) in attempts
