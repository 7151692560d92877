"""`summon_full_params` in real ranks, against plain tensors and PyTorch's own means."""

import pytest

from tests.launch import run_ranks
from tests.longer import sample
from tests.multiprocess.kinds import FAMILIES, kinds_for

WORKERS = "tests.multiprocess.workers"


# With four ranks those that two cannot show whole.
KINDS = {
    2: sample([kind.name for kind in kinds_for(2)], FAMILIES[1::2]),
    4: sample(["fsdp1-hybrid", "fsdp1-hybrid-orig", "hsdp", "tp-fsdp2", "tp-ddp"], ["hsdp"]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", KINDS)
def test_all_flags_on_all_kinds_show_and_keep_what_they_say(world_size: int) -> None:
    kinds = KINDS[world_size]
    results = run_ranks(f"{WORKERS}.local_summon_matrix", world_size, args=kinds, timeout_s=220)
    for result in results:
        passed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("ok ")]
        assert sorted(passed) == sorted(kinds)


def test_what_cannot_be_is_refused_and_odd_blocks_keep_their_word() -> None:
    results = run_ranks(f"{WORKERS}.local_summon_guards", 2, timeout_s=100)
    assert all(result.stdout.count("ok ") == 18 for result in results)


def test_stages_with_ranks_of_their_own_are_summoned_each_alone() -> None:
    results = run_ranks(f"{WORKERS}.local_summon_parties", 4, timeout_s=60)
    assert all(result.stdout.count("ok ") == 2 for result in results)
