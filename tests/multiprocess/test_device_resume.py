"""Trainings whose parameters and optimizer state are on the simulated device are killed and go on.

No GPU is involved: see tests/gpu/driver.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu.driver import driver_in, environment
from tests.longer import sample
from tests.multiprocess.test_resume import KINDS, Life, undisturbed

LATE_US = 100


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What every process of these tests has in its environment."""
    monkeypatch.setenv("PARAMD_ARENA", "device")
    for name, value in environment(tmp_path, late_us=LATE_US).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def allocations(folder: Path) -> int:
    with driver_in(folder) as (_, standin):
        return standin.allocations


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", sample(list(KINDS), {"plain", "fsdp2", "fsdp1-flat"}))
def test_killed_trainings_go_on_in_device_memory_with_the_bits_of_one_that_was_not(
    tmp_path: Path, kind: str, stack: ExitStack
) -> None:
    life = Life(tmp_path, kind, stack)
    life.struck(0, "forward", 6)
    # Each rank tried one, and has one for parameters and one for the optimizer's state.
    assert allocations(tmp_path) == 3 * life.world_size
    life.struck(life.world_size - 1, "update", 21)
    # Each tried one: everything else was mapped where it lay.
    assert allocations(tmp_path) == 4 * life.world_size
    life.ended()
    for started in life.starts():
        assert started[0] is None
        # Killed in the forward after a settled step: nothing is lost.
        assert started[1] == {"step": 6, "how": "live", "lost": 0}
        # Killed between an update and what goes with it: from the standing snapshot.
        assert started[2] is not None
        assert (started[2]["how"], started[2]["step"] >= 20) == ("snapshot", True)
    assert life.final() == undisturbed(tmp_path, kind)
