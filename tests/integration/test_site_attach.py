"""attach(control=...) and connect(url) over a site's control plane, with a real training."""

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import paramd
from paramd.errors import DeniedError, UsageError
from paramd.trainer.attaching.exchange import take_incarnation
from paramd.trainer.settings import AttachSettings
from tests.integration.control_process import Control, site_plane, site_token

pytestmark = pytest.mark.usefixtures("grpc_is_up")

PATIENCE_S = 60.0


@contextmanager
def trainer(control: Control, job: str, directory: Path, *more: str) -> Iterator[Any]:
    """What a training says; on another host, as it were: its state dir is its own."""
    with running(control, job, directory, *more) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())


@contextmanager
def running(
    control: Control, job: str, directory: Path, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "PARAMD_STATE_DIR": str(directory),
        "PARAMD_TOKEN": site_token(),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.integration.site_trainer", control.url, job, *more]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], PATIENCE_S)[0]
            yield process
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_a_job_of_a_site_is_read_by_its_name_and_restarts_in_a_higher_incarnation(
    tmp_path: Path,
) -> None:
    with site_plane() as control:
        with trainer(control, "one", tmp_path / "a") as said:
            assert said == {"incarnation": 1, "url": control.url}
            with paramd.connect(control.url, site_token(), job="one") as mesh:
                found = mesh.summon("weight")
                assert (found.incarnation, tuple(found["weight"].shape)) == (1, (4, 8))
                assert mesh.status()[0].reason == ""
        # Another host: it has never heard of the first incarnation.
        with trainer(control, "one", tmp_path / "b") as said:
            assert said["incarnation"] == 2
        listed = control.ask("GET", "/jobs/one/incarnations").json()["incarnations"]
        first, _second = (incarnation["reason"] for incarnation in listed)
        assert "all 1 ranks have detached" in first


def test_a_training_of_a_site_that_grows_goes_on_in_its_next_run(tmp_path: Path) -> None:
    with (
        site_plane() as control,
        running(control, "grows", tmp_path, "auto") as process,
        paramd.connect(control.url, site_token(), job="grows") as mesh,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["incarnation"] == 1
        assert tuple(mesh.summon("weight")["weight"].shape) == (4, 8)
        mesh.mark("small")
        assert [mark.name for mark in mesh.marks() if mark.name] == ["small"]
        process.stdin.write(b"grow\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["incarnation"] == 2
        found = mesh.summon("weight")
        assert (found.incarnation, tuple(found["weight"].shape)) == (2, (5, 8))
        assert not [mark.name for mark in mesh.marks() if mark.name]
        # Only the training itself goes on so: others are told that the name is taken.
        again = {"job": "grows", "world_size": 1, "succeeds": 1}
        refused = control.ask("POST", "/jobs", json=again)
        assert refused.status_code == 409
        listed = control.ask("GET", "/jobs/grows/incarnations").json()["incarnations"]
        assert "attachment.refresh" in listed[0]["reason"]


def test_a_training_whose_site_was_away_at_attach_registers_with_the_next_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site_plane() as control:
        listen = control.url.removeprefix("http://")
    monkeypatch.setenv("PARAMD_CONTROL_TIMEOUT_S", "0")
    with running(control, "early", tmp_path, "auto") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"incarnation": 1, "url": ""}
        with site_plane(listen=listen) as site:
            process.stdin.write(b"grow\n")
            process.stdin.flush()
            said = json.loads(process.stdout.readline())
            assert said == {"incarnation": 2, "url": site.url}
            with paramd.connect(site.url, site_token(), job="early", timeout=PATIENCE_S) as mesh:
                found = mesh.summon("weight")
                assert (found.incarnation, tuple(found["weight"].shape)) == (2, (5, 8))
                mesh.edit("weight", add=1.0)
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.in_turns
def test_two_jobs_of_a_site_are_compared(tmp_path: Path) -> None:
    with (
        site_plane() as control,
        trainer(control, "one", tmp_path / "a"),
        trainer(control, "two", tmp_path / "b"),
        paramd.connect(control.url, site_token(), job="one") as one,
        paramd.connect(control.url, site_token(), job="two") as two,
    ):
        two.edit("weight", add=1.0)
        one.pause()
        two.pause()
        answer = control.ask("GET", "/jobs/one/diff", params={"a": "now", "b": "job:two"})
        assert answer.status_code == 200, answer.text
        ours, theirs = one.summon("*"), two.summon("*")
        found = {row["name"]: row for row in answer.json()["tensors"]}
        assert set(found) == {"weight", "bias"}
        for name, row in found.items():
            norm = (theirs[name] - ours[name]).double().norm().item()
            assert row["norm"] == pytest.approx(norm, rel=1e-5)
        assert found["weight"]["norm"] > 0.1
        assert f"step {ours.step}" in answer.json()["a"]
        assert "two" in answer.json()["b"]


def settings(url: str, token: str = "") -> AttachSettings:
    return AttachSettings(control=url, token=token, control_timeout_s=0.0)


def test_a_site_that_refuses_is_an_error_and_one_that_is_away_is_not() -> None:
    with site_plane() as control:
        with pytest.raises(DeniedError, match="no token"):
            take_incarnation(settings(control.url), job="run", world_size=2)
        # Another site's, for example.
        told = f"{re.escape(control.url)}: the token is missing, unknown, expired or revoked"
        with pytest.raises(DeniedError, match=told):
            take_incarnation(settings(control.url, "wrong" * 8), job="run", world_size=2)
        taken = take_incarnation(settings(control.url, site_token()), job="run", world_size=2)
        assert taken.url == control.url
        assert (taken.incarnation, len(taken.rank_tickets), taken.private_key) == (1, 2, None)
        assert len(taken.copy_tickets) == 2
    with pytest.raises(UsageError, match="control"):
        take_incarnation(settings("nowhere", "t"), job="run", world_size=2)
    # Nobody listens there any more: the training gets an incarnation of its own, above the last.
    alone = take_incarnation(settings(control.url, "t" * 20), job="run", world_size=2)
    assert (alone.incarnation, alone.url, len(alone.rank_tickets)) == (2, "", 2)
    assert alone.private_key is not None


def test_a_site_that_is_being_restarted_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with site_plane() as control:
        listen, token = control.url.removeprefix("http://"), site_token()
    with ThreadPoolExecutor(1) as pool:
        wanted = AttachSettings(control=f"http://{listen}", token=token, control_timeout_s=120.0)
        taking = pool.submit(take_incarnation, wanted, job="run", world_size=1)
        while "asking again" not in caplog.text:
            assert not taking.done(), "it did not wait"
            time.sleep(0.01)
        with site_plane(listen=listen):
            taken = taking.result(PATIENCE_S)
    assert taken.url == f"http://{listen}"
    assert taken.private_key is None
