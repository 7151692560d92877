"""A training that is attached and ends without `detach` ends well, and soon."""

import pytest

from tests.launch import run_ranks
from tests.longer import takes_all

WORKER = "tests.multiprocess.workers.leaving"


@pytest.mark.in_turns
def test_processes_that_end_with_a_round_under_way_end_well() -> None:
    # The last is longer than an ending process waits for its round.
    often = 2 if takes_all() else 1
    lates_s = ["0"] * 6 * often + ["0.2"] * 2 * often + ["2.5"] * often
    (result,) = run_ranks(WORKER, 1, args=lates_s)
    lines = [line for line in result.stdout.splitlines() if line.startswith("exit ")]
    assert lines == ["exit [0, 0]"] * len(lates_s), result.stdout + result.stderr
