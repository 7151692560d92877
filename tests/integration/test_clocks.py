"""Clocks that jump by hours, in the processes of a job: nobody is refused who was let in."""

import os
import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx2
import pytest

from tests.integration.client_job import running_job, wait_for
from tests.integration.test_client import layout, write_arenas
from tests.integration.test_revocation import REVOKED, User
from tests.launch import free_port
from tests.longer import sample

# Python imports it at the start of every process that finds it on its path.
SITECUSTOMIZE = """
import os, sys, time
_real, _path, _who = time.time, os.environ["TEST_CLOCK"], os.environ["TEST_CLOCK_OF"]

def _shifted():
    # A deadline of gRPC moves with the clock; only its core knows, so it is left alone here.
    if sys._getframe(1).f_code.co_filename.endswith("service.py"):
        return _real()
    with open(_path) as file:
        return _real() + float(file.read() or 0)

if any(f"paramd_service.{_who}" in one for one in sys.orig_argv):
    time.time = _shifted
"""
LONG_ENOUGH_S = 2.5
"""The control plane looks at its tokens every second, and sidecars are told at once."""


class Clock:
    """The wall clock of some of the job's processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.shift(0.0)

    def shift(self, by_s: float) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(str(by_s))
        os.replace(new, self._path)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Clock:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TEST_CLOCK", str(tmp_path / "clock"))
    monkeypatch.setenv("TEST_CLOCK_OF", request.param)
    return Clock(tmp_path / "clock")


@pytest.mark.in_turns
@pytest.mark.parametrize("clock", ["control", "sidecar"], indirect=True)
def test_a_jump_and_its_end_refuse_nobody(clock: Clock) -> None:
    with running_job(layout()) as job, ExitStack() as stack:
        write_arenas(job)
        job.update(lambda rank, step: None)
        user = User(job, "someone", stack)
        wait_for(lambda: user.document().json()["joined_count"] == 2, "both ranks join")
        old = user.ticket
        for jump_s in (7200.0, -7200.0, 0.0):
            clock.shift(jump_s)
            until_s = time.monotonic() + LONG_ENOUGH_S
            while time.monotonic() < until_s:
                # A token of one hour, a ticket from before the jump, and one from now.
                answer = user.document()
                assert answer.status_code == 200, answer.text
                for user.ticket in (old, answer.json()["ticket"]):
                    assert user.status(0)[0] is grpc.StatusCode.OK, user.status(0)
                assert user.mesh.summon("rows").step == 1
        headers = {"authorization": f"Bearer {job.token}"}
        httpx2.delete(f"{job.url}/api/v1/tokens/someone", headers=headers).raise_for_status()
        wait_for(lambda: REVOKED in user.status(0)[1], "a revoked token is refused as ever")


@pytest.mark.in_turns
@pytest.mark.parametrize("clock", sample(["control", "sidecar"], ["control"]), indirect=True)
def test_who_starts_during_a_jump_refuses_nobody_when_it_ends(clock: Clock) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with running_job(layout(), listen=listen) as job, ExitStack() as stack:
        write_arenas(job)
        job.update(lambda rank, step: None)
        user = User(job, "someone", stack)
        for jump_s in (7200.0, -7200.0):
            clock.shift(jump_s)
            job.control.kill()
            job.control.wait()
            job.control = job._start_control(stack)
            for rank in job.ranks:
                rank.process.kill()
                job.respawn(rank)
            clock.shift(0.0)
            wait_for(lambda: user.document().json()["joined_count"] == 2, "both ranks join again")
            for ticket in (user.ticket, user.document().json()["ticket"]):
                user.ticket = ticket
                assert user.status(0)[0] is grpc.StatusCode.OK, user.status(0)
            assert user.mesh.summon("rows").step == 1
