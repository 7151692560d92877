"""Ranks that attach hear each other's messages whole, without a connection from each to all."""

from tests.launch import start_ranks


def test_messages_of_all_sizes_arrive_whole_at_every_rank() -> None:
    with start_ranks("tests.multiprocess.workers.telling", 3) as ranks:
        for result in ranks.wait(timeout_s=90):
            assert (result.returncode, "heard" in result.stdout) == (0, True), ranks.outputs()
