"""What trainings are made of, with each other: the same training, and the right values."""

from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.longer import share

WORKER = "tests.multiprocess.workers.combinations"
COMBINATIONS = [
    "fused-replicated", "foreach", "averaged", "compiled-checkpointed-fused", "compiled-replicated",
    "in-backward", "in-backward-checkpointed-compiled",
]  # fmt: skip


@pytest.mark.timeout(300)
def test_each_combination_trains_as_without_paramd_and_is_read_right() -> None:
    chosen = share(COMBINATIONS, 2)
    for result in run_ranks(WORKER, 2, args=chosen, timeout_s=280):
        assert [line.split(":")[0] for line in result.stdout.splitlines()] == chosen


@pytest.mark.parametrize(("case", "world_size"), [("two-models", 2), ("scaled", 1)])
def test_models_by_turns_and_skipped_updates_train_as_without_paramd(
    case: str, world_size: int, tmp_path: Path
) -> None:
    args = [case, "--folder", str(tmp_path)]
    results = run_ranks("tests.multiprocess.workers.trainers", world_size, args=args, timeout_s=100)
    assert all("the same" in result.stdout for result in results)
