"""A control plane without the parts of a subject, or of all: ranks join, and are read."""

import numpy as np
import pytest

import paramd
from paramd.parts import TRACE
from paramd.places import job_dir
from paramd_service.control.ended import main as ended
from paramd_service.parts import CONTROL
from tests.integration.client_job import JOB, Rank, halves, running_job
from tests.integration.without import subjects

SUBJECTS = subjects(CONTROL)
NUMEL = 16
ASKED = {
    "alerts": "/alerts",
    "audit": "/audit",
    "edits": "/edits",
    "exports": "/exports",
    "insight": "/why",
}
"""One of the operations of each subject."""


def write(rank: Rank, step: int) -> None:
    """One number everywhere: the step."""
    np.frombuffer(rank.arena.buffer, np.float32)[:] = step


@pytest.mark.parametrize(
    "without",
    dict.fromkeys([(), *((one,) for one in SUBJECTS), SUBJECTS]),
    ids=lambda without: ",".join(without) or "nothing",
)
def test_what_is_left_serves_and_says_what_is_missing(without: tuple[str, ...]) -> None:
    with running_job(halves(NUMEL), without=without) as job:
        job.update(write)
        with paramd.connect(job.url, job.token) as mesh:
            found = mesh.summon("weight")
            assert found.step == 1
            assert (found["weight"] == 1.0).all()
            job.update(write)
            assert (mesh.summon("weight")["weight"] == 2.0).all()
        assert job.ask("GET", "").json()["state"] == "ok"
        for subject, path in ASKED.items():
            answer = job.ask("GET", path)
            if subject in SUBJECTS and subject not in without:
                assert answer.status_code == 200, answer.text
                continue
            assert answer.status_code == 404
            assert f"GET /api/v1/jobs/{JOB}{path} is not served here" in answer.json()["detail"]
        left = [one for one in SUBJECTS if one not in without]
        if "exports" not in left and "insight" in left:
            answer = job.ask("GET", "/diff", params={"a": "export:abc"})
            assert answer.status_code == 409
            assert "an export is not served here" in answer.json()["detail"]


def test_the_calls_of_parts_are_logged_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE, "1")
    with running_job(halves(NUMEL)) as job:
        assert job.ask("GET", "").status_code == 200
        log = (job_dir(JOB) / "control.log").read_text()
    for part, method in (("edits", "began"), ("alerts", "health"), ("insight", "look")):
        assert f"part {part}: {method} took" in log


def test_what_the_store_of_an_ended_job_does_not_tell_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(["heralds", "--job", JOB]) == 2
    assert "heralds" in capsys.readouterr().err
