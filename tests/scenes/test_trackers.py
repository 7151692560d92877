"""`paramd track` with the trackers' real packages, offline, over a real training."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paramd
from tests.integration.client_job import demo_training, wait_for
from tests.launch import ROOT
from tests.longer import sample

# Each tracker's package takes seconds to import, in a process of its own.
pytestmark = pytest.mark.timeout(300)

JOB = "tracked"
NAME = "head.weight"


@pytest.fixture(scope="module", autouse=True)
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with demo_training(tmp_path_factory.mktemp("tracked"), JOB) as found:
        yield found


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


ALSO = ("--also", "histograms", "--also", "gradients", "--also", "updates")


def logged(
    tracker: str, folder: Path, environment: dict[str, str], *options: str, looks: int = 4
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paramd.cli", "track", "--to", tracker, NAME, "--job", JOB]
    command += ["--every", "0.3", "-n", str(looks), "--dir", str(folder), *options]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> None:
    with process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err


def events_of(folder: Path) -> Any:
    """The one run that TensorBoard's own reader finds there."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (run,) = folder.glob("*-*/")
    found = accumulator.EventAccumulator(str(run))
    found.Reload()
    return found


def test_tensorboard_has_all_of_it_at_its_steps_and_a_note_of_an_edit(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    process = logged("tensorboard", tmp_path, environment, *ALSO, looks=20)
    wait_for(lambda: sizes(tmp_path) > 200, "the first numbers")
    with paramd.connect(job=JOB) as mesh:
        applied = mesh.edit(NAME, mul=1.0, note="looked at")
        norm = mesh.stats(NAME).total.summary.norm
        numel = mesh.params(NAME)[0].numel
    finished(process)
    found = events_of(tmp_path)
    tags = set(found.Tags()["tensors"])
    assert {f"{NAME}/norm", f"{NAME}/nan_count", "total/mean", "paramd/note-1"} <= tags
    events = found.Tensors(f"{NAME}/norm")
    steps = [event.step for event in events]
    assert steps == sorted(set(steps))
    assert len(steps) > 1
    assert events[-1].tensor_proto.float_val[0] == pytest.approx(norm, rel=0.5)
    (noted,) = found.Tensors("paramd/note-1")
    text = noted.tensor_proto.string_val[0].decode()
    assert applied.id[:8] in text
    assert "looked at" in text
    for name in ("grad_norm", "update_norm", "update_ratio"):
        assert found.Tensors(f"{NAME}/{name}")[-1].tensor_proto.float_val[0] > 0
    histogram = found.Tensors(f"{NAME}/log2")[-1].tensor_proto
    rows = pytest.importorskip("tensorboard.util.tensor_util").make_ndarray(histogram)
    assert rows.shape[1] == 3
    assert list(rows[1:, 0]) == list(rows[:-1, 1])
    assert 0 < rows[:, 2].sum() <= numel


@pytest.mark.parametrize("tracker", sample(["wandb", "mlflow", "trackio"], ["wandb"]))
def test_a_tracker_keeps_all_of_it_offline(
    tracker: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip(tracker)
    finished(logged(tracker, tmp_path, environment, *ALSO))
    names = [f"{NAME}/{name}" for name in ("norm", "grad_norm", "update_norm")]
    if tracker == "wandb":
        (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        kept = written.read_bytes()
        names.append(f"{NAME}/log2")
    elif tracker == "mlflow":
        kept = (tmp_path / "mlflow.db").read_bytes()
        kinds = [json.loads(path.read_text()) for path in tmp_path.rglob("log2/step-*.json")]
        assert sum(kinds[-1][NAME].values()) > 0
    else:
        kept = b"".join(path.read_bytes() for path in (tmp_path / "trackio").rglob("*.db*"))
        names.append(f"{NAME}/log2")
    for name in names:
        assert name.encode() in kept, name


def test_attach_logs_to_a_tracker_until_it_detaches(
    tmp_path: Path, private_state_dir: Path, environment: dict[str, str]
) -> None:
    """The example, for as long as its first numbers take; no process of it stays."""
    example = ROOT / "examples" / "train_tracked.py"
    given = environment | {"PARAMD_STATE_DIR": str(private_state_dir), "PARAMD_LINGER_S": "1"}
    command = [sys.executable, str(example), "--job", "logged"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=given, stderr=subprocess.PIPE, text=True
    ) as training:
        end_s = time.monotonic() + 150
        while sizes(tmp_path / "runs") <= 200:
            assert training.poll() is None, training.communicate()
            assert time.monotonic() < end_s, "no first numbers"
            time.sleep(0.05)
        training.send_signal(signal.SIGINT)
        _, said = training.communicate(timeout=100)
    assert training.returncode == 0, said
    found = events_of(tmp_path / "runs")
    assert found.Tensors("0.weight/norm")
    assert "ended with status" not in said


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/events*"))
