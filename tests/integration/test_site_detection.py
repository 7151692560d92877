"""A control plane that has taken over, stands still, or sees no boundary; real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from paramd import places
from paramd.security.tickets import Role
from paramd.v1 import sidecar_pb2
from tests.integration.control_process import Control, control_plane
from tests.integration.fake_trainer import TrainerSettings, attach
from tests.integration.sidecar_process import SidecarProcess, client_of, sidecar
from tests.longer import seconds

pytestmark = pytest.mark.usefixtures("grpc_is_up")

READY_S = 30.0


@dataclass(frozen=True)
class Training:
    """One rank: a control plane, a sidecar, and a trainer that is a process of its own."""

    control: Control
    sidecar: SidecarProcess
    trainer: subprocess.Popen[bytes]

    def rank(self) -> Any:
        return self.control.get("/api/v1/jobs/job/ranks").json()["ranks"][0]

    def shows(self, condition: Callable[[Any], bool], within_s: float) -> Any:
        """The rank as soon as the condition holds; fails when that takes longer."""
        begun_s = time.monotonic()
        while not condition(rank := self.rank()):
            assert time.monotonic() - begun_s < within_s, rank
            time.sleep(0.02)
        return rank

    def is_well(self) -> Any:
        return self.shows(lambda rank: rank["state"] == "ok" and rank["step"] > 0, READY_S)


@contextmanager
def training(*options: str, listen: str = "127.0.0.1:0") -> Iterator[Training]:
    with (
        control_plane(*options, job="job", world_size=1, listen=listen) as control,
        sidecar(places.job_dir("job")) as process,
    ):
        command = [sys.executable, "-m", "tests.integration.fake_trainer"]
        command += ["--socket", str(process.socket_path), "--arena-bytes", str(1 << 16)]
        command += ["--control-address", control.grpc_address]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
            try:
                found = Training(control, process, trainer)
                found.is_well()
                yield found
            finally:
                for number in (signal.SIGCONT, signal.SIGKILL):
                    trainer.send_signal(number)


def test_a_sidecar_obeys_no_lower_generation_than_it_has_met() -> None:
    with sidecar(places.job_dir("job")) as process:
        trainer = attach(process.socket_path, TrainerSettings(arena_bytes=1 << 16))
        try:
            trainer.send_mesh()
            trainer.start()
            with client_of(trainer, Role.CONTROL) as client:

                def capture(boundary: int, generation: int) -> Any:
                    request = sidecar_pb2.ReachBoundaryRequest(
                        incarnation=1, boundary=boundary, generation=generation, token=1
                    )
                    return client.call("ReachBoundary", request)

                assert capture(1, 5).captured
                with pytest.raises(grpc.RpcError) as caught:
                    capture(2, 4)
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "generation 5 has taken over" in caught.value.details()
                assert capture(2, 6).captured
        finally:
            trainer.close()


def test_training_and_its_sidecar_go_on_while_the_control_plane_stands_still() -> None:
    with training("--report-s", "0.2", "--silent-after-s", "1.0") as found:
        step = found.rank()["step"]
        found.control.process.send_signal(signal.SIGSTOP)
        # Long enough for several attempts in vain of the sidecar.
        deadline_s = time.monotonic() + seconds(3.0, 600.0)
        while time.monotonic() < deadline_s:
            assert found.trainer.poll() is None
            assert found.sidecar.process.poll() is None
            time.sleep(0.1)
        found.control.process.send_signal(signal.SIGCONT)
        assert found.is_well()["step"] > step
