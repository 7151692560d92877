"""The command line and jobs that have ended: what is stored of them, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paramd import places
from paramd.cli.main import main
from paramd.errors import UsageError
from paramd.memory import handover
from tests.integration.client_job import JOB, Capture, Job, answer, document, running_job, wait_for
from tests.integration.test_client import layout


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARAMD_STATE_DIR", str(tmp_path))
    for name in ("PARAMD_OUTPUT", "PARAMD_JOB", "PARAMD_URL", "PARAMD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def detach(job: Job) -> None:
    """The trainers leave as `detach` has it: their sidecars go with them."""
    for rank in job.ranks:
        handover.send(rank.connection, {"op": "detach"})
    for rank in job.ranks:
        rank.process.wait(timeout=60)


@pytest.fixture
def past(capsys: Capture) -> str:
    """A job that made a step, refused an edit, and ended cleanly; gives its edit's id."""
    with running_job(layout()) as job:
        job.update()
        answer(capsys, "edit", "rows", "--mul", "2", "--note", "too late", "--no-wait")
        edit_id = document(capsys, "edits")["edits"][0]["id"]
        detach(job)
        job.control.wait(timeout=60)
    return edit_id


def test_a_clean_end_never_looks_like_an_outage(capsys: Capture) -> None:
    with running_job(layout()) as job:
        job.update()
        detach(job)
        # Asked again and again until the control plane is gone: from its leaving sidecars on.
        while job.control.poll() is None:
            found = document(capsys, "status", "--job", JOB)
            assert (found["state"], found["step"], found["ranks"]) == ("ended", 1, [])
    found = document(capsys, "status", "--job", JOB)
    assert (found["state"], found["step"], found["world_size"]) == ("ended", 1, 2)
    assert abs(found["ended_s"] - time.time()) < 60
    out, err = answer(capsys, "status", "--job", JOB)
    assert "ended" in out
    assert "after step 1, run 1" in err
    assert "step -1" not in out + err


def test_the_page_shows_an_ended_job_where_it_was_until_it_begins_again(past: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "DISPLAY"}
    port = (places.state_dir() / JOB / places.PORT_FILE).read_text().strip()
    stored = (places.state_dir() / JOB / "control.sqlite").read_bytes()
    command = [sys.executable, "-m", "paramd.cli", "dashboard", "--job", JOB]
    with ExitStack() as stack:
        shown = stack.enter_context(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(shown.terminate)
        assert shown.stdout is not None
        link = shown.stdout.readline().strip()
        url, _, code = link.removesuffix(f"/{JOB}").partition("/#/sign-in/")
        assert url == f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=f"{url}/api/v1", trust_env=False) as client:
            signed = client.post("/session", headers={"authorization": f"Paramd-Code {code}"})
            client.headers["x-paramd-session"] = signed.json()["key"]
            found = client.get("/jobs").json()["jobs"]
            assert [(one["health"], one["step"], one["incarnation"]) for one in found] == [
                ("ended", 1, 1)
            ]
            edits = client.get(f"/jobs/{JOB}/edits").json()["edits"]
            assert [(one["id"], one["undo"]["possible"]) for one in edits] == [(past, False)]
            for path, key in (
                ("ranks", "ranks"),
                ("incarnations", "incarnations"),
                ("alerts?state=all", "alerts"),
                ("exports", "exports"),
                ("audit", "records"),
                ("history/series", "series"),
                ("exports?state=DONE", "exports"),
                (f"edits/{past}", "id"),
            ):
                answer = client.get(f"/jobs/{JOB}/{path}")
                assert (answer.status_code, key in answer.json()) == (200, True), path
            told = client.get("/destinations").json()["destinations"]
            own = places.state_dir() / JOB / "checkpoints"
            assert [(one["name"], one["root"]) for one in told] == [("checkpoints", str(own))]
            for method, path in (
                ("GET", "params"),
                ("GET", "marks"),
                ("POST", "pause"),
                ("POST", "end"),
            ):
                refused = client.request(method, f"/jobs/{JOB}/{path}", json={})
                assert refused.status_code == 409, path
                assert "ended at" in refused.json()["detail"]
        assert (places.state_dir() / JOB / "control.sqlite").read_bytes() == stored
        with running_job(layout(), incarnation=2, listen="127.0.0.1:8470") as job:
            assert job.url == url
            assert shown.wait(timeout=60) == 0
    assert places.past_endpoint(JOB) is None


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
    assert "run.end" in methods
    limited = document(capsys, "audit", "-n", "2", "--job", JOB)["records"]
    assert [record["method"] for record in limited] == methods[:2]
    checks = document(capsys, "audit", "verify", "--job", JOB)["checks"]
    assert (checks[0]["good"], checks[0]["count"]) == (True, len(methods))
    assert "ended at" in answer(capsys, "edits", "--job", JOB)[1]
    # The logs of all its ranks, without their numbers.
    out, _ = answer(capsys, "logs", "--job", JOB)
    headings = [line for line in out.splitlines() if line.startswith("==>")]
    assert headings == [f"==> rank {rank}, sidecar <==" for rank in (0, 1)]
    rows = document(capsys, "logs", "-n", "3", "--job", JOB)["logs"]
    assert [(row["rank"], len(row["lines"])) for row in rows] == [(0, 3), (1, 3)]
    assert document(capsys, "logs", "1", "-n", "2", "--job", JOB)["rank"] == 1


def test_an_ended_job_is_its_owners_alone(past: str, state: Path, capsys: Capture) -> None:
    (state / JOB).chmod(0o755)
    for command in ("status", "edits", "audit"):
        out, err = answer(capsys, command, "--job", JOB, code=5)
        assert out == ""
        assert "chmod 700" in err


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


TRAINER = """
import sys, time
from tests.integration.client_job import running_job
from tests.integration.test_client import layout
with running_job(layout()) as job:
    job.update()
    print(job.ranks[0].process.pid, job.ranks[1].process.pid, job.control.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def dying() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A trainer in a process of its own, with (sidecar, sidecar, control plane)."""
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.program", TRAINER], stdout=subprocess.PIPE, text=True
    )
    pids: list[int] = []
    try:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        starts = [places.process_start(pid) for pid in pids]
        yield trainer, pids
    finally:
        trainer.kill()
        trainer.wait()
        assert trainer.stdout is not None
        trainer.stdout.close()
        for pid, start in zip(pids, starts, strict=True):
            if places.process_start(pid) == start:
                os.kill(pid, signal.SIGKILL)


def test_a_dead_training_says_how_to_go_on_first_and_is_not_in_the_way(
    dying: tuple[subprocess.Popen[str], list[int]],
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, _ = dying
    other = places.Endpoint(
        url="http://127.0.0.1:1", token="t", pid=os.getpid(), job="other",
        grpc_address="127.0.0.1:1", pid_start=places.process_start(os.getpid()),
    )  # fmt: skip
    places.write_endpoint(other)
    with pytest.raises(UsageError, match=f"several jobs run here: {JOB}, other; name one"):
        places.read_endpoint()
    trainer.kill()
    trainer.wait()

    def is_alone() -> bool:
        with suppress(UsageError):
            return places.read_endpoint() == other
        return False

    wait_for(is_alone, "the sidecars have noticed the end")
    assert f"no trainer of {JOB} is alive" in caplog.text
    places.remove_endpoint(other)
    main(["status", "--job", JOB])
    err = capsys.readouterr().err
    assert "start the script again (with attach(..., resume='auto'))" in err
    assert err.index("start the script again") < err.index(f"paramd cleanup {JOB}")


def test_the_next_run_has_the_ports_and_open_pages_of_one_that_died(
    dying: tuple[subprocess.Popen[str], list[int]],
) -> None:
    trainer, pids = dying
    before = places.read_endpoint(JOB)
    owner = {"authorization": f"Bearer {before.token}"}
    with httpx2.Client(base_url=f"{before.url}/api/v1", trust_env=False) as page:
        page.headers["x-paramd-session"] = page.post("/session", headers=owner).json()["key"]
        made = {"role": "viewer", "name": "wall"}
        wall = page.post("/tokens", json=made).json()["token"]
        viewer = {"authorization": f"Bearer {wall}"}
        trainer.kill()
        trainer.wait()
        with next_run() as (url, token):
            # The other one has left: nobody noticed more than that its answers were late.
            assert not places.process_start(pids[2])
            assert (url, token == before.token) == (before.url, False)
            signed = page.get("/session").json()
            assert (signed["name"], signed["role"]) == ("owner", "admin")
            assert [one["incarnation"] for one in page.get("/jobs").json()["jobs"]] == [2]
            assert page.get("/jobs", headers=viewer).status_code == 200
            page.cookies.clear()
            assert page.get("/jobs", headers=owner).status_code == 401


@contextmanager
def next_run() -> Iterator[tuple[str, str]]:
    """The control plane of the next run, as `attach` starts it: its URL and its token."""
    mine: dict[str, Any] = {"job": JOB, "incarnation": 2, "world_size": 2}
    mine |= {"private_key": "1" * 64, "token": "2" * 32}
    command = [sys.executable, "-m", "paramd_service.control", "--job", JOB]
    command += ["--listen-near", "127.0.0.1:8470"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(mine) + "\n")
            process.stdin.flush()
            yield json.loads(process.stdout.readline())["url"], mine["token"]
        finally:
            process.kill()


def test_end_frees_what_a_dead_training_left_and_never_a_living_one(
    dying: tuple[subprocess.Popen[str], list[int]], capsys: Capture
) -> None:
    trainer, pids = dying
    out, err = answer(capsys, "cleanup", JOB, code=5)
    assert (out, f"process {trainer.pid}" in err) == ("", True)
    assert all(map(places.process_start, pids))
    trainer.kill()
    trainer.wait()
    wait_for(lambda: main(["cleanup", JOB]) == 0, "the sidecars have noticed the end")
    out, err = capsys.readouterr()
    assert out.count("exited on request") == 2
    assert "freed" in err
    assert "2 of 2 sidecars" in err
    assert not any(map(places.process_start, pids[:2]))
    wait_for(lambda: not places.process_start(pids[2]), "the control plane has ended")
    # Again: nothing is left to do. It was audited, and the job says that it has ended.
    assert "nothing of job" in answer(capsys, "cleanup", JOB)[1]
    methods = [one["method"] for one in document(capsys, "audit", "--job", JOB)["records"]]
    assert methods.count("job.end") >= 2
    # How its first rank died is kept, whatever was done afterwards.
    reason = document(capsys, "status", "--job", JOB)["reason"]
    assert reason.startswith("rank "), reason
    assert reason.endswith("; then owner ended it"), reason
    answer(capsys, "cleanup", "never", code=4)
    assert "name the job" in answer(capsys, "cleanup", code=2)[1]


def test_end_needs_no_control_plane_and_signals_a_sidecar_that_hangs(
    dying: tuple[subprocess.Popen[str], list[int]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, pids = dying
    trainer.kill()
    trainer.wait()
    os.kill(pids[2], signal.SIGKILL)
    monkeypatch.setattr("paramd.cli.ended.ANSWER_S", 0.5)
    # One as of an older version, which does not know the question.
    asked = handover.send
    monkeypatch.setattr(
        "paramd.memory.handover.send",
        lambda connection, message: asked(connection, {**message, "op": "unheard-of"}),
    )
    found = document(capsys, "cleanup", JOB)["sidecars"]
    assert [(row["how"], row["left"]) for row in found] == [("left on SIGTERM", True)] * 2
    assert all(row["freed_bytes"] > 0 for row in found)
    assert not any(map(places.process_start, pids))
