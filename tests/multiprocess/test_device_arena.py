"""Parameters owned on a device, in real processes over the simulated driver of tests/gpu/driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.driver import environment
from tests.multiprocess.stamped import assert_stamped

SECONDS = 1.5
AT_LEAST = (10, 4)  # answers, steps
LATE_US = 300

CASES = [
    ("plain", 1, "free"),
    ("ddp", 2, "free"),
    ("fsdp1-full", 2, "lockstep"),
    ("fsdp2", 2, "free"),
    ("tp-fsdp2", 4, "lockstep"),
]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What every process of these tests has in its environment."""
    monkeypatch.setenv("PARAMD_ARENA", "device")
    for name, value in environment(tmp_path, late_us=LATE_US).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("kind", "world_size", "pace"), CASES)
def test_every_value_equals_the_step_the_answer_carries(
    kind: str, world_size: int, pace: str, tmp_path: Path
) -> None:
    assert_stamped(tmp_path, (kind, world_size, pace), seconds=SECONDS, at_least=AT_LEAST)
