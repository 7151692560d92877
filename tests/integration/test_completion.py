"""Shell completion, asked as the shell does: names of the job, quickly, or nothing at all."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramd.cli.completion import LEAST_S, WHOLE_S
from paramd.cli.main import main
from tests.integration.client_job import JOB, Job, running_job
from tests.integration.test_client import layout


@pytest.fixture(scope="module")
def job_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("completion")


@pytest.fixture(autouse=True)
def the_job_of_this_user(job_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(job_state))


@pytest.fixture(scope="module")
def job(job_state: Path) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(job_state))
        with running_job(layout()) as job:
            job.update()
            assert main(["edit", "rows", "--mul", "2", "--note", "mine", "--no-wait"]) == 0
            assert main(["token", "create", "--role", "viewer", "--name", "notebook"]) == 0
            yield job


def completed(line: str, **environment: str) -> list[str]:
    """What bash is told; a message or an error of any kind fails."""
    words = line.split(" ")
    found = subprocess.run(
        [sys.executable, "-m", "paramd.cli"],
        env={
            **os.environ,
            "_PARAMD_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert found.stderr == "", found.stderr
    assert "Traceback" not in found.stdout
    return found.stdout.split()


def patiently(line: str, **environment: str) -> list[str]:
    """The same, again while the busy machine is too slow for the time allowed."""
    for _ in range(20):
        if found := completed(line, **environment):
            return found
    return []


def test_names_and_ids_come_from_the_job(job: Job) -> None:
    assert patiently("paramd stats ro") == ["rows"]
    assert {"rows", "columns", "flat"} <= set(patiently("paramd params "))
    (edit_id,) = patiently("paramd undo ")
    assert len(edit_id) == 8
    assert patiently(f"paramd edits {edit_id[:3]}") == [edit_id]
    assert patiently("paramd export ch") == ["checkpoints/"]
    assert patiently("paramd token revoke n") == ["notebook"]
    assert patiently("paramd status --job cli") == [JOB]
    assert patiently("paramd cleanup cli") == [JOB]
    assert job.token not in " ".join(patiently("paramd --job client-test stats "))


def test_nothing_is_said_when_nobody_answers_or_the_token_is_wrong(
    job: Job, tmp_path: Path
) -> None:
    nowhere = {"PARAMD_STATE_DIR": str(tmp_path)}
    assert completed("paramd stats ro", **nowhere) == []
    assert completed("paramd stats ro", PARAMD_TOKEN="wrong") == []
    assert completed("paramd --token - stats ro") == []
    assert completed("paramd stats ro", PARAMD_URL="http://192.0.2.1:8470", PARAMD_TOKEN="t") == []
    # A server that accepts and never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert completed("paramd stats ro", PARAMD_URL=url, PARAMD_TOKEN="t") == []
    assert LEAST_S < WHOLE_S < 1.0
