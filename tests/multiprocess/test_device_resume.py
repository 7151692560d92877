"""Trainings whose parameters and optimizer state are on the simulated device are killed and go on.

No GPU is involved: see tests/gpu/driver.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paramd.errors import ParamdError
from paramd.trainer.resume.succession import NO_SIDECAR
from tests.gpu.driver import driver_in, environment
from tests.longer import sample
from tests.multiprocess.striking import arm, helper, is_down
from tests.multiprocess.test_optimizer_state import (
    assert_stored,
    assert_told,
    hanging,
    stored_in,
    training,
    truth,
)
from tests.multiprocess.test_resume import (
    Life,
    ends_undisturbed,
    kill,
    offered,
    undisturbed,
    wait_for,
)
from tests.multiprocess.workers.optimizer_state import digest

LATE_US = 100
KINDS = ["plain", "ddp", "fsdp1-flat", "fsdp2", "tp-fsdp2"]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What every process of these tests has in its environment."""
    monkeypatch.setenv("PARAMD_ARENA", "device")
    # Copies of a device that is late with each of them, on a machine that may be busy.
    monkeypatch.setenv("PARAMD_STALL_BUDGET_MS", "500")
    for name, value in environment(tmp_path, late_us=LATE_US).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def allocations(folder: Path) -> int:
    with driver_in(folder) as (_, standin):
        return standin.allocations


def die_in(life: Life, steps: int) -> bool:
    """Have rank 0 kill itself some steps from now; False if it is not known where it is."""
    step = step_of(life)
    if step:
        (life.folder / "die-0").write_text(f"forward {step + steps}")
    return bool(step)


def step_of(life: Life) -> int:
    """What rank 0 told last; 0 before it has, or while it does."""
    return int(life.at()[0] or 0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", sample(KINDS, {"fsdp1-flat"}))
def test_killed_trainings_go_on_in_device_memory_with_the_bits_of_one_that_was_not(
    tmp_path: Path, kind: str, stack: ExitStack
) -> None:
    life = Life(tmp_path, kind, stack)
    life.struck(0, "forward", 6)
    # Each rank tried one, and has one for parameters and one for the optimizer's state.
    assert allocations(tmp_path) == 3 * life.world_size
    life.struck(life.world_size - 1, "update", 21)
    # Each tried one: everything else was mapped where it lay.
    assert allocations(tmp_path) == 4 * life.world_size
    ends_undisturbed(life)


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_memory_that_is_gone_with_trainer_and_sidecar_is_said_and_training_begins_anew(
    tmp_path: Path, stack: ExitStack
) -> None:
    life = Life(tmp_path, "plain", stack)
    ranks = life.start("--pause-s", "0.01")
    wait_for(lambda: step_of(life) >= 5, ranks)
    ranks.kill()  # helpers, too
    (rank,) = life.ended()
    assert life.starts() == [[None, None]]
    assert f"starts afresh: {NO_SIDECAR}" in rank.stderr
    assert life.final() == undisturbed("plain")


@pytest.mark.in_turns
@pytest.mark.timeout(400)
def test_sidecars_killed_as_they_make_memory_for_the_state_and_later_leave_it_to_a_successor(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, state = tmp_path / "faults", tmp_path / "state" / "resuming"
    faults.mkdir()
    monkeypatch.setenv("PARAMD_FAULTS_DIR", str(faults))
    arm(faults, 0, "state-allocated:kill")
    life = Life(tmp_path, "plain", stack, "--steps", "120")
    ranks = life.start("--pause-s", "0.1")
    # By the second one, when it is asked again.
    wait_for(lambda: allocated(state / "rank-0.log"), ranks)
    assert "has no memory on the device, since the sidecar does not answer" in ranks[0].stderr
    second = helper(ranks, "sidecar", 0)
    second.kill()
    wait_for(lambda: is_down(second) and is_owned(state / "rank-0.sock"), ranks)
    wait_for(lambda: die_in(life, 20), ranks)
    wait_for(lambda: ranks[0].process.poll() == -signal.SIGKILL, ranks)
    last = life.ended()
    (started,) = life.starts()
    assert started[1] is not None
    assert (started[1]["how"], started[1]["lost"]) == ("live", 0), last.outputs()
    assert life.final() == undisturbed("plain", steps=120)


def allocated(told: Path) -> bool:
    """Whether a sidecar's log says that it made memory for state."""
    return told.exists() and "state-allocated" in told.read_text()


def is_owned(socket_path: Path) -> bool:
    """Whether a sidecar there has a trainer."""
    try:
        return bool(offered(socket_path)["ownership"] == "OWNED")
    except (ParamdError, OSError, EOFError):
        return False


@pytest.mark.in_turns
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_state_on_the_device_is_read_and_exported_while_it_trains_and_when_the_trainers_are_dead(
    tmp_path: Path,
) -> None:
    with training(tmp_path, ends=False) as (mesh, ranks):
        found = mesh.summon("*", optimizer=True)
        assert found.optimizer is not None
        known = truth(tmp_path, found.step)
        assert_told(found.optimizer, known)
        assert {name: digest(tensor) for name, tensor in found.items()} == {
            name: one[""] for name, one in known.items() if name in found
        }
        # Of tied parameters there is one row, under either name.
        rms = [row.moment_rms for row in mesh.updates("*") if found.optimizer[row.name]]
        assert len(rms) > 3
        assert all(map(math.isfinite, rms))
        include = ["parameters", "optimizer"]
        done = mesh.export("here/dcp", format="dcp", include=include).wait(timeout=60)
        assert_stored(stored_by_dcp(tmp_path / "out" / "dcp"), truth(tmp_path, done.step))
        # Killed within an update they would leave parameters alone.
        hanging(tmp_path)
        kill(ranks)
        died = mesh.optimizer(timeout=30.0)
        known = truth(tmp_path, died.step)
        assert_told(died, known)
        mesh.export("here/last", include=include).wait(timeout=60)
        assert_stored(stored_in(tmp_path / "out" / "last"), known)


def stored_by_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export for torch.distributed.checkpoint, as that reads them."""
    told = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in told.items()
        if isinstance(one, TensorStorageMetadata)
    }
    dcp.load(dict(found), checkpoint_id=str(folder), no_dist=True)
    return found
