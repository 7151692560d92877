"""Trainer and sidecars in two containers: own users, processes and mounts, one network, one folder.

As in a pod: neither container sees the other's processes, SO_PEERCRED names no pid, and both run as
a user without rights. What they share is a folder in memory and loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from paramd.errors import UnreachableError
from paramd.mesh.mesh import Mesh
from tests.launch import ROOT
from tests.multiprocess.stamped import read_stamps
from tests.multiprocess.test_resume import KINDS, undisturbed
from tests.multiprocess.truth import connect_to, wait_until
from tests.needs import missing, program

PATIENCE_S = 90.0
STEPS = 150
ISOLATED = ("--user", "--map-user=10001", "--map-group=10001", "--pid", "--mount", "--fork",
            "--mount-proc")  # fmt: skip


class Container:
    """Programs in namespaces of their own; all end when the first one does."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def running(self, *words: str) -> list[psutil.Process]:
        """Processes of it whose command line has these words."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = one.cmdline() if one.status() != psutil.STATUS_ZOMBIE else []
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                found.append(one)
        return found

    def kill(self) -> None:
        """End all of it at once, as a kubelet does after the grace period; wait until it has."""
        if self.process.poll() is None:
            inside = psutil.Process(self.process.pid).children(recursive=True)
            for first in psutil.Process(self.process.pid).children():
                first.kill()
            _, left = psutil.wait_procs(inside, timeout=PATIENCE_S)
            assert not left
            self.process.kill()
        self.process.wait()


class Pod:
    """A folder that containers share, and what was started in it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.state = folder / "state"
        self._folder = folder
        self._stack = stack

    @contextmanager
    def container(self, name: str, *arguments: str, **variables: str) -> Iterator[Container]:
        output = self._folder / f"{name}-{time.monotonic_ns()}"
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        environment = os.environ | {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "PARAMD_LISTEN": "127.0.0.1:0",
            "PARAMD_STATE_DIR": str(self.state),
            **variables,
        }
        with output.open("wb") as file:
            process = subprocess.Popen(
                [program("unshare"), *ISOLATED, "--", *arguments],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        container = Container(process, output)
        try:
            yield container
        finally:
            container.kill()

    def sidecars(self) -> Container:
        """Starts the container that hosts them, as its image's command does."""
        paramd = str(Path(sys.executable).with_name("paramd"))
        return self._stack.enter_context(
            self.container("sidecars", sys.executable, paramd, "sidecar", "host")
        )

    def training(self, worker: str, *arguments: str) -> Container:
        """Starts the container that trains, with two ranks."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return self._stack.enter_context(
            self.container(
                "training", sys.executable, *torchrun, "-m", worker, *arguments,
                PARAMD_SIDECAR="external",
            )
        )  # fmt: skip

    def log(self, job: str, rank: int) -> list[dict[str, object]]:
        """What the sidecars of a rank have logged."""
        path = self.state / job / f"rank-{rank}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def told(self, job: str, rank: int, event: str) -> list[dict[str, object]]:
        return [line for line in self.log(job, rank) if line.get("event") == event]


@pytest.fixture
def pod() -> Iterator[Pod]:
    allowed = subprocess.run([program("unshare"), *ISOLATED, "true"], check=False)
    if allowed.returncode:
        missing("the right to make user namespaces")
    folder = Path(tempfile.mkdtemp(prefix="paramd-pod-", dir="/dev/shm"))
    try:
        with ExitStack() as stack:
            yield Pod(folder, stack)
    finally:
        shutil.rmtree(folder)


def sidecar_of(host: Container, rank: int) -> psutil.Process | None:
    found = host.running("paramd_service.sidecar", "--rank", str(rank))
    return found[0] if found else None


def killed(host: Container, rank: int) -> None:
    """Kill a rank's sidecar and wait for the next one."""
    before = sidecar_of(host, rank)
    assert before is not None, host.output
    before.kill()

    def is_back() -> bool:
        now = sidecar_of(host, rank)
        return now is not None and now.pid != before.pid

    wait_until(is_back, f"a sidecar of rank {rank} after one was killed")


@contextmanager
def connected(pod: Pod, job: str) -> Iterator[Mesh]:
    """A client, once the job's control plane has started; the first attempt may be too slow."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            mesh = connect_to(pod.state, job)
            break
        except (UnreachableError, AssertionError):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    with mesh:
        yield mesh


def assert_all(params: Mapping[str, torch.Tensor], value: int) -> None:
    for name, tensor in params.items():
        assert bool((tensor == torch.tensor(value).to(tensor.dtype)).all()), name


@pytest.mark.timeout(300)
def test_a_sidecar_in_another_container_serves_edits_and_comes_back(
    pod: Pod, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    # The trainer first: it waits for the other container.
    training = pod.training(
        "tests.multiprocess.workers.stamp",
        *("--kind", "fsdp2", "--stop", str(stop), "--lockstep", "--gap-ms", "3"),
    )
    host = pod.sidecars()
    wait_until(
        lambda: training.output.count("attached") == 2, training.output, timeout_s=PATIENCE_S
    )
    assert training.running("paramd_service.sidecar") == []
    # As root outside, as nobody in particular inside.
    status = Path(f"/proc/{sidecar_of(host, 0).pid}/status").read_text()  # type: ignore[union-attr]
    assert "CapEff:\t0000000000000000" in status

    with connected(pod, "stamp") as mesh:
        readings = read_stamps(pod.state, seconds=1.0, at_least=(20, 5))
        assert (readings.wrong, readings.refused) == ([], [])

        ranks = list(mesh.why(log_lines=5))
        assert [one.source for one in ranks] == ["trainer", "trainer"]
        assert all("another container" in one.log_missing for one in ranks)
        assert [one.rss_bytes for one in ranks] == [None, None]

        step = mesh.pause().step
        edit = mesh.edit("*", fill=7.0)
        assert_all(mesh.summon("*"), 7)
        mesh.undo(edit.id)
        assert_all(mesh.summon("*"), step)
        mesh.resume()

        # Killed while it is read and trained: its successor takes the same memory over.
        readings = read_stamps(pod.state, seconds=2.0, during=lambda: killed(host, 1))
        assert readings.wrong == []
        wait_until(lambda: len(pod.told("stamp", 1, "attached")) == 2, "it is attached again")
        readings = read_stamps(pod.state, seconds=1.0, at_least=(20, 5))
        assert readings.wrong == []

        # The whole container, as after a crash of its first process.
        host.kill()
        host = pod.sidecars()
        wait_until(
            lambda: len(pod.told("stamp", 0, "attached")) == 2, "attached", timeout_s=PATIENCE_S
        )
        wait_until(
            lambda: not any(one.reason for one in mesh.status()),
            "all ranks joined again",
            timeout_s=PATIENCE_S,
        )
        readings = read_stamps(pod.state, seconds=1.0, at_least=(20, 5))
        assert readings.wrong == []

    stop.touch()
    assert training.process.wait(PATIENCE_S) == 0, training.output
    # Told by the trainers' detach; the host itself goes on until its own signal.
    wait_until(lambda: not host.running("paramd_service.sidecar"), "sidecars that were detached")
    assert host.process.poll() is None
    (first,) = psutil.Process(host.process.pid).children()
    first.send_signal(signal.SIGTERM)
    assert host.process.wait(PATIENCE_S) == 0, host.output


@pytest.mark.timeout(300)
def test_a_trainer_that_is_killed_goes_on_from_the_other_containers_memory(
    pod: Pod, tmp_path: Path
) -> None:
    calm = undisturbed("fsdp2", steps=STEPS)
    life = tmp_path / "life"
    life.mkdir()
    host = pod.sidecars()
    options = [
        str(life), "--kind", "fsdp2", "--optimizer", KINDS["fsdp2"][1], "--steps", str(STEPS),
    ]  # fmt: skip
    worker = "tests.multiprocess.workers.resuming"
    # So slow that it is never done before it is killed.
    training = pod.training(worker, *options, "--pause-s", "0.5")

    def reached(step: int) -> bool:
        assert training.process.poll() is None, training.output
        at = life / "at-0"
        return at.exists() and int(at.read_text() or 0) >= step

    wait_until(lambda: reached(2), training.output, timeout_s=PATIENCE_S)
    killed(host, 0)
    wait_until(lambda: len(pod.told("resuming", 0, "serving")) == 2, "it is served by a successor")
    # Held, so that all ranks are killed at one step, and between two updates.
    with connected(pod, "resuming") as mesh:
        step = mesh.pause(timeout=PATIENCE_S).step
    training.kill()
    for rank in range(2):
        # By the pidfd that it was given: no pid of the trainer's container means anything here.
        wait_until(
            lambda rank=rank: bool(pod.told("resuming", rank, "trainer-ended")),  # type: ignore[misc]
            f"rank {rank}'s sidecar notices: {pod.log('resuming', rank)}",
        )
    assert sidecar_of(host, 0) is not None
    training = pod.training(worker, *options)
    assert training.process.wait(PATIENCE_S) == 0, training.output
    for rank in range(2):
        lines = (life / f"starts-{rank}").read_text().splitlines()
        first, second = map(json.loads, lines)
        assert first is None
        assert second["step"] == step, training.output
        assert json.loads((life / f"final-{rank}").read_text()) == calm[rank]
