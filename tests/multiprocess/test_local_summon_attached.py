"""Edits in `summon_full_params` are updates for whoever reads through the sidecars."""

from pathlib import Path

import pytest

from tests.launch import start_ranks
from tests.longer import sample
from tests.multiprocess.stamped import read_stamps

WORKER = "tests.multiprocess.workers.local_summon_attached"
CASES = [("fsdp1-full", 2), ("tp-ddp", 4)]


@pytest.mark.parametrize(("kind", "world_size"), sample(CASES, CASES[:1]))
def test_a_remote_summon_never_sees_half_of_a_local_edit(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    with start_ranks(WORKER, world_size, args=["--kind", kind, "--stop", str(stop)]) as ranks:
        ranks.wait_for_text("attached", rank=0)
        try:
            readings = read_stamps(ranks.state_dir, seconds=2.0, at_least=(1, 3))
        finally:
            stop.touch()
        ranks.end_well(40)
        assert readings.wrong == []
        assert len(readings.steps) > 2, readings
