"""What trainings are made of, with each other: the same training, and the right values."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks

WORKER = "tests.multiprocess.workers.combinations"
GROUPS = [
    ["fused", "fused-replicated", "foreach", "checkpointed", "averaged", "adapters"],
    ["compiled", "compiled-checkpointed-fused", "compiled-replicated"],
    ["in-backward", "in-backward-checkpointed-compiled", "schedule-free", "eight-bit"],
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_each_combination_trains_as_without_paramd_and_is_read_right(group: list[str]) -> None:
    results = run_ranks(WORKER, 2, args=group, timeout_s=280)
    for result in results:
        assert [line.split(":")[0] for line in result.stdout.splitlines()] == group
