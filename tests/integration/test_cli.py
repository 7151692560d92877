"""The command line against a real job: what it prints is right, and how it ends."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paramd import places
from paramd.cli import status
from paramd.cli.main import main
from paramd.mesh.connect import connect
from tests.integration.client_job import JOB, Capture, Job, answer, document, running_job, wait_for
from tests.integration.test_client import layout, write_arenas

NAMES = ["rows", "columns", "flat", "both", "turned", "scalar", "empty", "flags"]


@pytest.fixture(scope="module")
def job_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def job(job_state: Path) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(job_state))
        with running_job(layout()) as job:
            with connect(job.url, job.token, job=JOB) as mesh:
                wait_for(lambda: all(r.step >= 0 for r in mesh.status()), "all have joined")
            yield job


@pytest.fixture(scope="module")
def whole(job: Job) -> dict[str, torch.Tensor]:
    return write_arenas(job)


@pytest.fixture(autouse=True)
def the_job_of_this_user(job_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(job_state))
    monkeypatch.delenv("PARAMD_OUTPUT", raising=False)


def test_summon_writes_what_the_safetensors_library_reads(
    whole: dict[str, torch.Tensor], tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "all.safetensors"
    out, err = answer(capsys, "summon", "*", "-f", str(path))
    assert out == ""
    assert "step 0" in err
    read = load_file(path)
    assert sorted(read) == sorted(NAMES)
    for name in NAMES:
        assert read[name].dtype == whole[name].dtype
        assert torch.equal(read[name], whole[name]), name
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {
            "format": "pt",
            "paramd_job": JOB,
            "paramd_incarnation": "1",
            "paramd_step": "0",
            "tied": "rows",
        }


def test_summon_replaces_a_file_only_by_force(job: Job, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "one.safetensors"
    path.write_text("mine")
    _, err = answer(capsys, "summon", "flat", "-f", str(path), code=5)
    assert "--overwrite" in err
    assert path.read_text() == "mine"
    answer(capsys, "summon", "flat", "-f", str(path), "--overwrite")
    assert set(load_file(path)) == {"flat"}


def test_a_reader_that_goes_away_costs_no_traceback(job: Job) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        found = subprocess.run(
            [sys.executable, "-m", "paramd.cli", "params"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert found.returncode == 141
    assert "Error" not in found.stderr


def test_a_rank_without_its_sidecar_is_shown_and_makes_the_answer_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    with running_job(layout()) as job:
        wait_for(lambda: main(["status", "-o", "name"]) == 0, "all ranks well")
        capsys.readouterr()
        job.ranks[1].process.kill()
        job.ranks[1].process.wait()
        out, err = answer(capsys, "status", code=6)
        assert out.splitlines()[2].split()[:2] == ["1", "unreachable"]
        assert "1 of 2 ranks are healthy" in err
        rows = document(capsys, "doctor", code=1)["checks"]
        found = {row["check"]: row for row in rows}
        assert found[f"job {JOB} rank 1"]["verdict"] == "failed"
        assert "rank-1.log" in found[f"job {JOB} rank 1"]["advice"]


def test_control_planes_that_hang_are_asked_at_once_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    # Longer than this test may take: were they asked in turn, the second would never be.
    monkeypatch.setattr(status, "ANSWER_S", 600.0)
    silent = socket.create_server(("127.0.0.1", 0), backlog=64)

    def hang_up_once_all_are_there() -> None:
        for one in [silent.accept()[0] for _ in range(12)]:
            one.close()

    with silent, ThreadPoolExecutor(1) as pool:
        host, port = silent.getsockname()
        for n in range(12):
            places.write_endpoint(places.Endpoint(
                url=f"http://{host}:{port}", token="t", pid=os.getpid(), job=f"hung-{n}",
                grpc_address=f"{host}:{port}", pid_start=places.process_start(os.getpid()),
            ))  # fmt: skip
        hung_up = pool.submit(hang_up_once_all_are_there)
        told = document(capsys, "jobs")["jobs"]
        hung_up.result()
        assert [one["state"] for one in told] == ["unreachable"] * 12
        monkeypatch.setattr(status, "ANSWER_S", 1.0)
        told = document(capsys, "jobs")["jobs"]
    assert [one["state"] for one in told] == ["unreachable"] * 12


def test_without_a_running_job_those_that_ended_last_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "state"))
    assert "no job runs here" in answer(capsys, "jobs")[1]
    for n in range(7):
        line = {"incarnation": 1, "world_size": 2, "began_s": 1e9, "ended_s": 1e9 + n, "step": n}
        (places.job_dir(f"run-{n}") / places.HISTORY_FILE).write_text(json.dumps(line) + "\n")
    out, err = answer(capsys, "jobs")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:5] == ["JOB", "STATE", "RUN", "RANKS", "STEP"]
    assert [row[:5] for row in rows[1:]] == [
        [f"run-{n}", "ended", "1", "2", str(n)] for n in (6, 5, 4, 3, 2)
    ]
    assert "All 7: paramd jobs --all" in err
    assert document(capsys, "jobs")["jobs"] == []
    found = document(capsys, "jobs", "--all")["jobs"]
    assert [(one["state"], one["step"], one["ended_s"]) for one in found] == [
        ("ended", n, 1e9 + n) for n in range(7)
    ]
    places.next_incarnation("new")
    assert [line.split()[:2] for line in answer(capsys, "jobs")[0].splitlines()[1:]] == [
        ["new", "starting"]
    ]
