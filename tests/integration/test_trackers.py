"""`paramd log` with the trackers' real packages, offline, over a real training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paramd
from paramd.cli.demo import started
from paramd.cli.main import main
from paramd.errors import UsageError
from paramd.integrations.trackers import open_tracker
from tests.integration.client_job import wait_for

JOB = "tracked"
NAME = "head.weight"


@pytest.fixture(scope="module", autouse=True)
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(folder / "state"))
        patch.setenv("PARAMD_LISTEN", "127.0.0.1:0")
        with started(JOB, folder, keep=True, ranks=1) as process:
            process.wait_until_open(timeout_s=100)
            wait_for(lambda: main(["status", "-o", "name"]) == 0, "all ranks well")
            yield folder / "state"


@pytest.fixture
def environment(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where every tracker keeps its runs beside the test, and goes nowhere else."""
    monkeypatch.setenv("PARAMD_STATE_DIR", str(training))
    return os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }


def logged(
    tracker: str, folder: Path, environment: dict[str, str], looks: int = 4
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paramd.cli", "log", "--to", tracker, NAME, "--job", JOB]
    command += ["--every", "0.3", "-n", str(looks), "--dir", str(folder)]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> None:
    with process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err


def test_tensorboard_has_the_statistics_at_their_steps_and_a_note_of_an_edit(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    process = logged("tensorboard", tmp_path, environment, looks=40)
    wait_for(lambda: any(tmp_path.glob("*/events*")), "the first numbers")
    with paramd.connect(job=JOB) as mesh:
        applied = mesh.edit(NAME, mul=1.0, note="looked at")
        norm = mesh.stats(NAME).total.summary.norm
    finished(process)
    (folder,) = tmp_path.glob(f"{JOB}-*")
    found: Any = accumulator.EventAccumulator(str(folder))
    found.Reload()
    tags = set(found.Tags()["tensors"])
    assert {f"{NAME}/norm", f"{NAME}/nan_count", "total/mean", "paramd/note-1"} <= tags
    events = found.Tensors(f"{NAME}/norm")
    steps = [event.step for event in events]
    assert steps == sorted(set(steps))
    assert len(steps) > 1
    assert events[-1].tensor_proto.float_val[0] == pytest.approx(norm, rel=0.5)
    noted = found.SummaryMetadata("paramd/note-1").summary_description
    assert applied.id[:8] in noted
    assert "looked at" in noted


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_tracker_keeps_the_statistics_offline(
    tracker: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip(tracker)
    finished(logged(tracker, tmp_path, environment))
    if tracker == "wandb":
        (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        assert f"{NAME}/norm".encode() in written.read_bytes()
    elif tracker == "mlflow":
        assert b"head.weight/norm" in (tmp_path / "mlflow.db").read_bytes()
    else:
        written = [path.read_bytes() for path in (tmp_path / "trackio").rglob("*.db*")]
        assert any(b"head.weight/norm" in data for data in written)


def test_a_tracker_that_is_none_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tensorboard, wandb, mlflow, trackio"):
        open_tracker("excel", project="p", run="r", directory=tmp_path)
