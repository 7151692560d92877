"""Write-back, undo and holds of a training whose every element holds its step."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paramd.errors import ConflictError, UsageError
from paramd.memory.descriptors import lent_memory
from paramd.mesh.edits import editing
from paramd.mesh.edits.calls import EditState
from paramd.mesh.mesh import Mesh
from paramd.mesh.results import Summoned
from tests.longer import sample
from tests.multiprocess.frozen import frozen
from tests.multiprocess.truth import assert_same_bytes, connect_to, step_of, wait_until

KINDS = [("fsdp1-full-orig", 2), ("tp-fsdp2", 4)]


@pytest.fixture(scope="module", params=sample(KINDS, KINDS[1:]), ids=str)
def state_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    kind, world_size = request.param
    with frozen(tmp_path_factory.mktemp("writeback"), kind, world_size, "--adds") as ranks:
        yield ranks.state_dir


@pytest.fixture
def mesh(state_dir: Path) -> Iterator[Mesh]:
    with connect_to(state_dir, "frozen") as connected:
        yield connected


def distinct(params: Summoned) -> list[torch.Tensor]:
    """Each tensor once: tied names share one."""
    return list({id(tensor): tensor for tensor in params.values()}.values())


def above_step(mesh: Mesh) -> float:
    """What every element holds beyond the step; fails when they differ."""
    found = mesh.summon("*")
    values = {float(v) for tensor in found.values() for v in tensor.unique()}
    assert len(values) == 1, (found.step, sorted(values)[:5])
    return values.pop() - found.step


def goes_on(mesh: Mesh) -> None:
    first = step_of(mesh)
    wait_until(lambda: step_of(mesh) > first + 2, "training goes on", timeout_s=20)


def test_an_exception_in_the_block_and_an_unchanged_block_write_nothing(mesh: Mesh) -> None:
    before, count = above_step(mesh), len(mesh.edits())

    def fails() -> None:
        with mesh.summon("*", writeback=True) as params:
            for tensor in params.values():
                tensor.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with mesh.summon("*", writeback=True, pause=False):
        pass

    def clears() -> None:
        with mesh.summon("*", writeback=True, pause=False) as params:
            params.clear()

    with pytest.raises(UsageError, match="added to or removed from"):
        clears()
    assert mesh.pause_state().state == "running"
    assert (above_step(mesh), len(mesh.edits())) == (before, count)


def test_if_step_refuses_when_training_has_gone_on(mesh: Mesh) -> None:
    before = above_step(mesh)

    def comes_late() -> None:
        with mesh.summon("*", writeback=True, pause=False, if_step=True) as params:
            for tensor in params.values():
                tensor.zero_()
            wait_until(lambda: step_of(mesh) > params.step + 1, "it went on", timeout_s=20)

    with pytest.raises(ConflictError, match="step"):
        comes_late()
    assert above_step(mesh) == before


def counted(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Whole numbers, each element its own: sums with a few steps are exact."""
    values = torch.arange(first, first + tensor.numel()) % 60_000
    return values.to(tensor.dtype).reshape(tensor.shape)


@pytest.fixture
def lends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has tensors lent that would be too small for it."""
    monkeypatch.setattr(editing, "LENT_FROM_BYTES", 0)


@pytest.mark.usefixtures("lends")
@pytest.mark.parametrize("mode", ["replace", "delta"])
def test_tensors_that_are_lent_are_written_bit_by_bit(mesh: Mesh, mode: str) -> None:
    """Twice, so that memory and loans serve again; some are assigned, so are not lent."""
    before = above_step(mesh)
    wanted: dict[str, torch.Tensor] = {}
    for round_number in range(2):
        with mesh.summon("*", writeback=True, mode=mode) as params:
            lent = [lent_memory(one.data_ptr(), one.nbytes) for one in distinct(params)]
            assert all(one is not None for one in lent) is (mode == "replace")
            for number, tensor in enumerate(distinct(params)):
                tensor.copy_(counted(tensor, 1000 * round_number + number))
            for name in list(params)[1::3]:
                params[name] = params[name].clone()
            wanted = {name: tensor.clone() for name, tensor in params.items()}
        edit = mesh.edits(limit=1)[0]
        found = mesh.summon("*")
        assert_same_bytes(found, {n: one + (found.step - edit.step) for n, one in wanted.items()})
        # Whatever is written into them afterwards is the client's own.
        for tensor in params.values():
            tensor.fill_(float("nan"))
        assert all(bool(one.isfinite().all()) for one in mesh.summon("*").values())
    with mesh.summon("*", writeback=True) as params:
        for tensor in distinct(params):
            tensor.fill_(before + params.step)
    assert above_step(mesh) == before


@pytest.mark.parametrize("transport", ["stream", "grpc"])
def test_tensors_go_bit_by_bit_over_every_lane(mesh: Mesh, transport: str) -> None:
    before = above_step(mesh)
    params = mesh.summon("*", transport=transport)
    for number, tensor in enumerate(distinct(params)):
        tensor.copy_(counted(tensor, 7000 + number))
    wanted = {name: tensor.clone() for name, tensor in params.items()}
    untied = {id(tensor): name for name, tensor in params.items()}
    operands = {name: params[name] for name in untied.values()}
    edit = mesh.edit(set=operands, transport=transport)
    found = mesh.summon("*", transport=transport)
    assert_same_bytes(found, {n: one + (found.step - edit.step) for n, one in wanted.items()})
    with mesh.summon("*", writeback=True) as again:
        for tensor in distinct(again):
            tensor.fill_(before + again.step)
    assert above_step(mesh) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from paramd.mesh.edits import editing, lending
from tests.multiprocess.truth import connect_to

editing.LENT_FROM_BYTES = lending._MESSAGE_BYTES = 0
with connect_to(Path(sys.argv[1]), "frozen") as mesh:
    told = lambda done, _: done and os.kill(os.getpid(), signal.SIGKILL)
    with mesh.summon("*", writeback=True, pause=False, mode="replace", progress=told) as params:
        for tensor in params.values():
            tensor.fill_(7.0)
"""


def test_a_client_killed_while_its_memory_is_read_changes_nothing(
    mesh: Mesh, state_dir: Path
) -> None:
    before, count = above_step(mesh), len(mesh.edits())
    done = subprocess.run(
        [sys.executable, "-m", "tests.program", KILLED, str(state_dir)], check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    (edit,) = mesh.edits(limit=len(mesh.edits()) - count)
    assert edit.state is EditState.STAGING
    mesh.abort_edit(edit.id)
    assert above_step(mesh) == before
    goes_on(mesh)
