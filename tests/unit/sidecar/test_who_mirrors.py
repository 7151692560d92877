"""Ranks that ask their trainers to mirror come to do so at the same boundary."""

import pytest

from paramd_service.sidecar.snapshots.moments import BY_TRAINER, MISSES, WhoMirrors


@pytest.mark.parametrize("ahead", range(MISSES + BY_TRAINER + 1))
def test_ranks_out_of_step_mirror_at_one_boundary(ahead: int) -> None:
    """The first rank counted misses alone before; a table counts only if both ranks have it."""
    ranks = [WhoMirrors(), WhoMirrors()]

    def boundary(rank: WhoMirrors) -> bool:
        mirrored = rank.trainer()  # what is not recorded cannot be mirrored without the trainer
        if mirrored:
            rank.mirrored()
        else:
            rank.missed()
        return mirrored

    for _ in range(ahead):
        boundary(ranks[0])
    attempts = [tuple(map(boundary, ranks)) for _ in range(MISSES + BY_TRAINER)]
    assert (True, True) in attempts


def test_the_copying_thread_tries_again_after_some_boundaries_of_the_trainers() -> None:
    who = WhoMirrors()
    assert not who.trainer()
    for _ in range(MISSES):
        who.missed()
    assert [who.trainer() for _ in range(BY_TRAINER + 1)] == [True] * BY_TRAINER + [False]
    who.missed()
    who.mirrored()
    who.missed()
    assert not who.trainer()
