"""Above all: a snapshot never mixes steps, on any rank, for any kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.stamped import read_stamps, stamp_trainer

SECONDS = 6.0

CASES = [
    ("ddp", 2),
    ("fsdp1-full", 2),
    ("fsdp1-full-orig", 3),
    ("fsdp1-no-shard", 2),
    ("fsdp1-hybrid", 4),
    ("fsdp2", 2),
    ("hsdp", 4),
    ("tp", 3),
    ("tp-fsdp2", 4),
    ("tp-ddp", 4),
]


@pytest.mark.parametrize("lockstep", [True, False], ids=["lockstep", "free"])
@pytest.mark.parametrize(("kind", "world_size"), CASES)
def test_every_value_equals_the_step_the_answer_carries(
    kind: str, world_size: int, lockstep: bool, tmp_path: Path, record_property: object
) -> None:
    options = ["--lockstep", "--gap-ms", "3"] if lockstep else []
    with stamp_trainer(tmp_path, kind, world_size, *options) as ranks:
        readings = read_stamps(ranks.state_dir, seconds=SECONDS)
    print(f"{kind} x{world_size}: {readings.answers} answers, {len(readings.steps)} steps")
    assert readings.wrong == []
    assert readings.refused == []
    assert readings.answers > 20
    assert len(readings.steps) > 5
