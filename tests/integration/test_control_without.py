"""A control plane without the parts of a subject, or of all: ranks join, and are read."""

import numpy as np
import pytest

import paramd
from paramd.errors import ConflictError
from paramd.parts import TRACE
from paramd.places import job_dir
from paramd_service.control.ended import main as ended
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.parts import ControlPart
from paramd_service.parts import CONTROL
from tests import control_services
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


@pytest.mark.parametrize("without", [*((one,) for one in SUBJECTS), SUBJECTS], ids=",".join)
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
            if subject not in without:
                assert answer.status_code == 200, answer.text
                continue
            assert answer.status_code == 404
            assert f"GET /api/v1/jobs/{JOB}{path} is not served here" in answer.json()["detail"]
        if "exports" in without and "insight" not in without:
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


class Failing(ControlPart):
    """Fails whatever it hears."""

    name = "failing"

    def began(self, mesh: Incarnation) -> None:
        raise ValueError("began")

    def ended(self, mesh: Incarnation) -> None:
        raise ValueError("ended")


async def test_a_packages_part_that_fails_ends_no_job_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"{__name__}:{Failing.__name__}"
    host = control_services.host(names=(name, "paramd_service.edits.control:Edits"))
    mesh = host.jobs.get("run")
    host.parts.began(mesh)
    assert await host.parts.lost_marks("run") == [], "the next part has begun"
    host.parts.ended(mesh)
    await host.parts.closed()
    told = [one.getMessage() for one in caplog.records]
    assert told == [
        "part failing has failed in began",
        "part failing has failed in ended",
    ]


async def test_what_one_part_asks_of_another_that_is_not_there_is_refused() -> None:
    host = control_services.host(names=())
    mesh = host.jobs.get("run")
    with pytest.raises(ConflictError, match="pausing training is not served here"):
        await host.parts.pause("run", "an alert")
    with pytest.raises(ConflictError, match="an export is not served here"):
        await host.parts.exported("run", "abc")
    assert host.parts.look(mesh) is None
    assert host.parts.failed("run") is None
    assert await host.parts.lost_marks("run") == []
    assert await host.parts.checkpoints("run") == []


def test_what_the_store_of_an_ended_job_does_not_tell_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(["heralds", "--job", JOB]) == 2
    assert "heralds" in capsys.readouterr().err
