"""The benchmark of arenas on a device, on the simulated driver, where its numbers mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.gpu.driver import driver_in, environment


@pytest.mark.timeout(300)  # five processes that import torch, one after the other
def test_it_trains_reads_follows_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_GPU_TESTS_ON", "cpu")
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    found = gpu.steps(("64", "1", "0.2"))
    assert found["device"] == "simulated"
    assert found["statistics_frames"] > 0
    found["restarts"] = gpu.restarts(("64", "3"), 1)
    with driver_in(tmp_path) as (_, standin):
        assert standin.allocations > 0
    (told,) = found["restarts"]
    assert told["state_bytes"] == 3 * 3 * 64 * 64 * 4
    assert 0 < told["stages"]["paramd.attach"] < told["until_step_s"]
    assert len(gpu.goals(found)) == 6
    assert "gradient statistics" in "".join(table.markdown() for table in gpu.tables(found))


def test_nothing_is_measured_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = gpu.run(quick=True)
    assert (report.tables, report.goals) == ([], [])
    assert report.notes[0].startswith("Nothing was measured")
