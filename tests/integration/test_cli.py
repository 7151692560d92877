"""The command line against a real job: what it prints is right, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paramd.cli.main import main
from paramd.mesh.connect import connect
from tests.integration.client_job import JOB, Capture, Job, answer, document, running_job, wait_for
from tests.integration.control_process import control_plane
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


def test_status_shows_every_rank(job: Job, capsys: Capture) -> None:
    out, err = answer(capsys, "status")
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["0", "idle"], ["1", "idle"]]
    assert err == (
        f"paramd: job {JOB}, run 1, step 0\n"
        "paramd: health: ok\n"
        f"paramd: dashboard: {job.url} (paramd dashboard opens it, signed in)\n"
    )
    found = document(capsys, "status")
    assert (found["job"], found["incarnation"], found["world_size"]) == (JOB, 1, 2)
    assert [row["arena_bytes"] for row in found["ranks"]] == [1024, 1024]


def test_params_are_filtered_by_facts_and_statistics(job: Job, capsys: Capture) -> None:
    every = {row["name"]: row for row in document(capsys, "params")["params"]}
    largest = max(row["numel"] for row in every.values())
    wanted = {name for name, row in every.items() if row["numel"] == largest}
    assert set(answer(capsys, "params", f"numel>={largest}", "-o", "name")[0].split()) == wanted
    norms = {row["name"]: row["norm"] for row in document(capsys, "stats", "rows")["stats"]}
    found = document(capsys, "params", "rows", f"norm>{norms['rows'] - 1}")
    assert ([row["name"] for row in found["params"]], found["step"] >= 0) == (["rows"], True)
    assert document(capsys, "params", "rows", f"norm>{norms['rows'] + 1}")["params"] == []
    _, err = answer(capsys, "params", "numl>3", code=2)
    assert "at character 1, 'numl': expected one of" in err


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


def test_url_and_token_are_enough(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path / "elsewhere"))
    file = tmp_path / "token"
    file.write_text(job.token + "\n")
    file.chmod(0o600)
    answer(capsys, "status", "--url", job.url, "--token", f"@{file}")
    answer(capsys, "--url", job.url, "--token", f"@{file}", "params", "--job", JOB)
    monkeypatch.setenv("PARAMD_URL", job.url)
    monkeypatch.setenv("PARAMD_TOKEN", job.token)
    answer(capsys, "status")


def test_a_wrong_token_is_denied_and_not_shown(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PARAMD_TOKEN", "not-the-right-token")
    out, err = answer(capsys, "status", code=7)
    assert out == ""
    assert "not-the-right-token" not in err


def test_data_and_messages_stay_apart_in_a_real_shell(job: Job) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "paramd.cli", "params", "rows", "-o", "json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["params"][0]["name"] == "rows"
    assert found.stderr == "paramd: 1 tensors, 20 elements\n"


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


def test_a_job_of_which_no_rank_has_joined_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    with control_plane(job=JOB, world_size=2):
        _, err = answer(capsys, "status", code=6)
        assert "is starting: none of its 2 ranks has joined yet" in err
