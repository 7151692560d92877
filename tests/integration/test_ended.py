"""The command line and jobs that have ended: what is stored of them, and what they leave behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from paramd.cli.main import main
from paramd.memory import handover
from tests.integration.client_job import JOB, Job, running_job
from tests.integration.test_client import layout

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    for name in ("PARAMD_OUTPUT", "PARAMD_JOB", "PARAMD_URL", "PARAMD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def answer(capsys: Capture, *arguments: str, code: int = 0) -> tuple[str, str]:
    """What a command wrote to stdout and stderr, once its exit code is the expected one."""
    found = main(arguments)
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.out, captured.err


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    found = json.loads(answer(capsys, *arguments, "-o", "json")[0])
    assert isinstance(found, dict)
    return found


def detach(job: Job) -> None:
    """The trainers leave as `detach` has it: their sidecars go with them."""
    for rank in job.ranks:
        handover.send(rank.connection, {"op": "detach"})
    for rank in job.ranks:
        rank.process.wait(timeout=20)


@pytest.fixture
def past(capsys: Capture) -> str:
    """A job that made a step, refused an edit, and ended cleanly; gives its edit's id."""
    with running_job(layout()) as job:
        job.update()
        answer(capsys, "edit", "rows", "--mul", "2", "--note", "too late", "--no-wait")
        edit_id = document(capsys, "edits")["edits"][0]["id"]
        detach(job)
        job.control.wait(timeout=20)
    return edit_id


def test_a_clean_end_never_looks_like_an_outage(capsys: Capture) -> None:
    with running_job(layout()) as job:
        job.update()
        detach(job)
        # Asked again and again until the control plane is gone: from its leaving sidecars on.
        while job.control.poll() is None:
            found = document(capsys, "status")
            assert (found["state"], found["step"], found["ranks"]) == ("ended", 1, [])
    found = document(capsys, "status", "--job", JOB)
    assert (found["state"], found["step"], found["world_size"]) == ("ended", 1, 2)
    assert abs(found["ended_s"] - time.time()) < 60
    out, err = answer(capsys, "status", "--job", JOB)
    assert "ended" in out
    assert "after step 1, incarnation 1" in err
    assert "step -1" not in out + err


def test_edits_and_audit_of_an_ended_job_come_from_disk(past: str, capsys: Capture) -> None:
    found = document(capsys, "edits", "--job", JOB)
    assert [(row["id"], row["note"]) for row in found["edits"]] == [(past, "too late")]
    one = document(capsys, "edits", past[:8], "--job", JOB)["edits"][0]
    assert (one["undoable"], one["ops"][0]["op"]) == (False, "mul")
    assert document(capsys, "edits", "--job", JOB, "--state", "applied")["edits"] == []
    _, err = answer(capsys, "edits", "ffffffff", "--job", JOB, code=4)
    assert "no edit" in err
    listed = document(capsys, "audit", "--job", JOB)
    methods = [record["method"] for record in listed["records"]]
    assert (methods[0], methods[-1]) == ("control.stop", "control.start")
    assert "incarnation.end" in methods
    limited = document(capsys, "audit", "-n", "2", "--job", JOB)["records"]
    assert [record["method"] for record in limited] == methods[:2]
    checks = document(capsys, "audit", "verify", "--job", JOB)["checks"]
    assert (checks[0]["good"], checks[0]["count"]) == (True, len(methods))
    assert "ended at" in answer(capsys, "edits", "--job", JOB)[1]


def test_reading_an_ended_job_changes_nothing_on_disk(
    past: str, state: Path, capsys: Capture
) -> None:
    store = state / JOB / "control.sqlite"
    before = (store.read_bytes(), sorted(path.name for path in store.parent.iterdir()))
    for command in (["status"], ["edits"], ["audit"], ["audit", "verify"]):
        answer(capsys, *command, "--job", JOB)
    assert (store.read_bytes(), sorted(path.name for path in store.parent.iterdir())) == before


def test_an_ended_job_is_its_owners_alone(past: str, state: Path, capsys: Capture) -> None:
    (state / JOB).chmod(0o755)
    for command in ("status", "edits", "audit"):
        out, err = answer(capsys, command, "--job", JOB, code=5)
        assert out == ""
        assert "chmod 700" in err


def test_a_command_for_live_jobs_tells_when_the_job_ended(past: str, capsys: Capture) -> None:
    _, err = answer(capsys, "params", "--job", JOB, code=3)
    assert "ended at" in err
    assert "after step 1" in err
    assert JOB in answer(capsys, "status", code=3)[1]


def test_an_unknown_job_is_not_found(capsys: Capture, state: Path) -> None:
    for command in ("status", "edits", "audit", "params", "alerts"):
        _, err = answer(capsys, command, "--job", "never", code=4)
        assert "'never' is not known here" in err
    assert not (state / "never").exists()


def test_a_killed_job_says_that_nobody_noted_its_end(capsys: Capture) -> None:
    with running_job(layout()) as job:
        job.update()
        job.control.kill()
        job.control.wait()
        # Its sidecars, and so perhaps its training, live on: this is an outage, not an end.
        _, err = answer(capsys, "status", "--job", JOB, code=3)
        assert "sidecars of ranks 0, 1 do" in err
    found = document(capsys, "status", "--job", JOB)
    assert (found["state"], found["ended_s"]) == ("ended", None)
    assert "nobody noted when" in answer(capsys, "status", "--job", JOB)[1]
    answer(capsys, "edits", "--job", JOB)
