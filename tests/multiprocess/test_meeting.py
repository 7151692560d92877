"""Ranks that attach hear each other's messages whole, without a connection from each to all."""

from __future__ import annotations

import math

import pytest

from benchmarks.meeting import measured
from tests.launch import start_ranks

RANKS = 16


@pytest.mark.timeout(200)
def test_ranks_meet_without_a_connection_from_each_to_all() -> None:
    found = measured(RANKS)
    # A broadcast's tree, its partners in a gather, and the listener.
    assert found["connections_of_others"] <= 3 + math.ceil(math.log2(RANKS)), found
    assert found["connections_of_rank_0"] <= RANKS + 1, found


def test_messages_of_all_sizes_arrive_whole_at_every_rank() -> None:
    with start_ranks("tests.multiprocess.workers.telling", 3) as ranks:
        for result in ranks.wait(timeout_s=90):
            assert (result.returncode, "heard" in result.stdout) == (0, True), ranks.outputs()
