"""Parameters owned on a device, in real processes over the simulated driver of tests/gpu/driver.

No GPU is involved: what these tests show of the driver is what the simulated one has of it.
"""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from paramd.errors import ConflictError, ParamdError
from paramd.memory.device_driver import CUDA, HIP
from paramd.mesh.mesh import Mesh
from tests.gpu.driver import driver_in, environment
from tests.gpu.late import QUEUE
from tests.gpu.worker import JOB
from tests.launch import Ranks, run_ranks, start_ranks
from tests.longer import sample
from tests.multiprocess.stamped import assert_stamped
from tests.multiprocess.striking import helper
from tests.multiprocess.truth import connect_to, wait_until

WORKER = "tests.gpu.worker"
SECONDS = 1.0
AT_LEAST = (10, 4)  # answers, steps
LATE_US = 100
STEPS, PAUSE_AT = 40, 20
DEADLINE_S = 90.0

CASES = [("ddp", 2, "free"), ("fsdp1-full", 2, "lockstep"), ("tp", 2, "lockstep")]
SAMPLE = [("fsdp1-full", 2, "lockstep")]


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What every process of these tests has in its environment; the parameter is a kind."""
    kind = getattr(request, "param", CUDA)
    monkeypatch.setenv("PARAMD_ARENA", "device")
    monkeypatch.setenv("PARAMD_GPU_TESTS_ON", "cpu")
    for name, value in environment(tmp_path, late_us=LATE_US, kind=kind).items():
        monkeypatch.setenv(name, value)


@contextmanager
def paused(folder: Path, stack: ExitStack, *options: str) -> Iterator[tuple[Ranks, Mesh]]:
    """A training that waits after update `PAUSE_AT` until `folder/go` exists."""
    arguments = ["--pause-at", str(PAUSE_AT), "--go", str(folder / "go"), *options]
    ranks = stack.enter_context(start_ranks(WORKER, 1, args=arguments, state_dir=folder / "state"))
    ranks.wait_for_text("paused", rank=0, timeout_s=DEADLINE_S)
    wait_until((folder / "state" / JOB / "endpoint.json").exists, "it is served")
    with connect_to(ranks.state_dir, JOB) as mesh:
        yield ranks, mesh


@contextmanager
def stamping(folder: Path, mode: str = "stamp") -> Iterator[tuple[Mesh, list[str]]]:
    """A training that ends well when the block does; then the list has what it wrote to stderr."""
    stop, told = folder / "stop", list[str]()
    with start_ranks(WORKER, 1, args=["--mode", mode, "--stop", str(stop)]) as ranks:
        ranks.wait_for_text("attached", rank=0, timeout_s=DEADLINE_S)
        with connect_to(ranks.state_dir, JOB) as mesh:
            wait_until(lambda: mesh.status().step > 0, "it trains")
            yield mesh, told
        stop.touch()
        (ended,) = ranks.wait(timeout_s=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    told.append(ended.stderr)


def held(text: str) -> str:
    return text.rpartition("holds ")[2].split()[0]


@cache
def trained_bare(*options: str) -> str:
    """What a training without paramd ends with."""
    arguments = ["--mode", "train", "--steps", str(STEPS), "--bare", *options]
    return held(run_ranks(WORKER, 1, args=arguments, timeout_s=DEADLINE_S)[0].stdout)


def contexts(folder: Path) -> int:
    with driver_in(folder) as (_, standin):
        return standin.contexts


def summoned(mesh: Mesh) -> dict[str, torch.Tensor]:
    """All parameters, as soon as somebody serves them."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return dict(mesh.summon("*", timeout=10))
        except ParamdError as error:
            if "mix two states" in str(error) or time.monotonic() > until_s:
                raise


@pytest.mark.parametrize(("kind", "world_size", "pace"), sample(CASES, SAMPLE))
def test_every_value_equals_the_step_the_answer_carries(
    kind: str, world_size: int, pace: str, tmp_path: Path
) -> None:
    assert_stamped(tmp_path, (kind, world_size, pace), seconds=SECONDS, at_least=AT_LEAST)
    with driver_in(tmp_path) as (_, standin):
        # Else the arenas were none of the device's.
        assert standin.allocations >= 2 * world_size


def test_a_sidecar_has_no_context_before_somebody_reads_and_its_death_changes_no_bit(
    tmp_path: Path,
) -> None:
    bare = trained_bare()
    with ExitStack() as stack:
        options = ("--mode", "train", "--steps", str(STEPS))
        with paused(tmp_path, stack, *options) as (ranks, mesh):
            assert contexts(tmp_path) == 1  # the trainer's
            before = summoned(mesh)
            assert contexts(tmp_path) == 2
            helper(ranks, "sidecar", 0).send_signal(signal.SIGKILL)
            after = summoned(mesh)
            assert all(torch.equal(before[name], after[name]) for name in before)
            (tmp_path / "go").touch()
            (ended,) = ranks.wait(timeout_s=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    assert held(ended.stdout) == bare


@pytest.mark.parametrize("device", sample([CUDA, HIP], [CUDA]), indirect=True)
def test_a_killed_trainer_leaves_its_weights_readable_and_a_successor_maps_them_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--mode", "train", "--steps", str(STEPS))
    bare = trained_bare()
    monkeypatch.setenv("PARAMD_RESUME", "auto")
    with ExitStack() as stack:
        with paused(tmp_path, stack, *options) as (ranks, mesh):
            alive = summoned(mesh)
            ranks[0].process.send_signal(signal.SIGKILL)
            ranks[0].process.wait()
            left = summoned(mesh)
            assert all(torch.equal(alive[name], left[name]) for name in alive)
        (tmp_path / "go").touch()
        ranks = stack.enter_context(
            start_ranks(WORKER, 1, args=options, state_dir=tmp_path / "state")
        )
        (ended,) = ranks.wait(timeout_s=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    assert f"from step {PAUSE_AT}, live" in ended.stdout, ended.stderr
    assert held(ended.stdout) == bare


@pytest.mark.in_turns
def test_weights_that_the_device_had_not_finished_are_refused_once_the_trainer_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STANDIN_LATE_US", "150000")
    monkeypatch.setenv(QUEUE, "1000000")
    with (
        ExitStack() as stack,
        paused(tmp_path, stack, "--mode", "stamp", "--stop", str(tmp_path / "stop")) as (
            ranks,
            mesh,
        ),
    ):
        ranks[0].process.send_signal(signal.SIGKILL)
        with pytest.raises(ConflictError, match="mix two states"):
            summoned(mesh)


def test_a_training_that_never_waits_for_its_device_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STANDIN_LATE_US", "600")
    monkeypatch.setenv(QUEUE, "1000000")
    with stamping(tmp_path) as (mesh, _):
        for _ in range(3):
            found = mesh.summon("*", timeout=30)
            assert all(bool((value == found.step).all()) for value in found.values())


@pytest.mark.parametrize("device", sample([CUDA, HIP], [HIP]), indirect=True)
def test_every_moment_equals_the_step_the_answer_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Copies that an update overtook are thrown away, but the checker counts them.
    monkeypatch.setenv("PARAMD_STALL_BUDGET_MS", "10000")
    with stamping(tmp_path, "moments") as (mesh, _):
        steps = set()
        for _ in range(10):
            found = mesh.summon("*", optimizer=True, timeout=DEADLINE_S)
            assert found.optimizer is not None
            steps.add(found.step)
            for name, tensor in found.items():
                stamp = found.optimizer[name]["stamp"]
                assert isinstance(stamp, torch.Tensor)
                assert bool((stamp == found.step).all()), (name, found.step)
                assert bool((tensor == found.step).all()), (name, found.step)
    assert len(steps) > 3
    with driver_in(tmp_path) as (_, standin):
        assert standin.unordered == 0
        # One was tried, and the state has one of its own.
        assert standin.allocations == 3


def test_a_driver_that_forbids_it_leaves_the_parameters_mirrored_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMD_STANDIN_LIMITS", "fd")
    with stamping(tmp_path) as (mesh, told):
        found = mesh.summon("*", timeout=DEADLINE_S)
        assert all(bool((tensor == found.step).all()) for tensor in found.values())
    lines = re.findall("cannot be owned on their device: .*by file descriptors", told[0])
    assert len(lines) == 1, told
