"""Above all: a snapshot never mixes steps, on any rank, for any kind."""

from pathlib import Path

import pytest

from tests.longer import sample, seconds
from tests.multiprocess.stamped import assert_stamped

SECONDS = seconds(1.0, 60.0)
AT_LEAST = (20, 5)  # answers, steps

# Ranks in lockstep, as a collective in the step keeps them, and ranks that run free.
CASES = [
    ("ddp", 2, "free"), ("fsdp1-full", 2, "lockstep"), ("fsdp1-full-orig", 3, "free"),
    ("fsdp1-no-shard", 2, "lockstep"), ("fsdp2", 2, "free"), ("hsdp", 4, "lockstep"),
    ("tp", 3, "free"), ("tp-fsdp2", 4, "lockstep"), ("tp-ddp", 4, "free"),
]  # fmt: skip
SAMPLE = (("fsdp1-full", 2, "lockstep"), ("fsdp2", 2, "free"), ("tp-fsdp2", 4, "lockstep"))


@pytest.mark.parametrize(("kind", "world_size", "pace"), sample(CASES, SAMPLE))
def test_every_value_equals_the_step_the_answer_carries(
    kind: str, world_size: int, pace: str, tmp_path: Path
) -> None:
    assert_stamped(tmp_path, (kind, world_size, pace), seconds=SECONDS, at_least=AT_LEAST)
