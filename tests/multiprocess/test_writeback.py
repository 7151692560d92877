"""Write-back, undo and holds of a training whose every element holds its step."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
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
from tests.multiprocess.frozen import frozen
from tests.multiprocess.truth import assert_same_bytes, connect_to, wait_until


@pytest.fixture(scope="module", params=[("fsdp1-full-orig", 2), ("tp-fsdp2", 4)], ids=str)
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


def step_of(mesh: Mesh) -> int:
    return min(row.step for row in mesh.status())


def goes_on(mesh: Mesh) -> None:
    first = step_of(mesh)
    wait_until(lambda: step_of(mesh) > first + 2, "training goes on", timeout_s=20)


def test_in_a_hold_training_waits_and_what_is_changed_is_written(mesh: Mesh) -> None:
    before = above_step(mesh)
    with mesh.summon("*", writeback=True) as params:
        assert mesh.hold_state().state == "held"
        for tensor in distinct(params):
            tensor.add_(1000)
        assert step_of(mesh) == params.step
    edit = mesh.edits(limit=1)[0]
    assert (edit.state, edit.step) == (EditState.APPLIED, params.step)
    assert mesh.hold_state().state == "running"
    assert above_step(mesh) == before + 1000
    goes_on(mesh)


def test_an_exception_in_the_block_and_an_unchanged_block_write_nothing(mesh: Mesh) -> None:
    before, count = above_step(mesh), len(mesh.edits())

    def fails() -> None:
        with mesh.summon("*", writeback=True) as params:
            for tensor in params.values():
                tensor.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with mesh.summon("*", writeback=True, hold=False):
        pass

    def clears() -> None:
        with mesh.summon("*", writeback=True, hold=False) as params:
            params.clear()

    with pytest.raises(UsageError, match="added to or removed from"):
        clears()
    assert mesh.hold_state().state == "running"
    assert (above_step(mesh), len(mesh.edits())) == (before, count)


def test_a_delta_is_added_to_what_training_made_of_it_and_undone_by_subtraction(
    mesh: Mesh,
) -> None:
    before = above_step(mesh)
    with mesh.summon("*", writeback=True, hold=False) as params:
        for tensor in distinct(params):
            tensor.add_(500)
        wait_until(lambda: step_of(mesh) > params.step + 3, "training went on", timeout_s=20)
    assert above_step(mesh) == before + 500
    undone = mesh.undo(mesh.edits(limit=1)[0].id)
    assert undone.state is EditState.APPLIED
    assert above_step(mesh) == before
    first = next(edit for edit in mesh.edits() if edit.id == undone.undo_of)
    assert first.undone_by == undone.id
    with pytest.raises(ConflictError):
        mesh.undo(first.id)


def test_a_replacement_overwrites_a_region_and_undo_puts_it_back(mesh: Mesh) -> None:
    before = above_step(mesh)
    name = next(info.name for info in mesh.params() if info.shape and info.shape[0] > 4)
    edit = mesh.edit(f"{name}[1:3]", fill=-7.0)
    found = mesh.summon(name)
    expected = -7.0 + found.step - edit.step
    assert bool((found[name][1:3] == expected).all())
    assert bool((found[name][3:] == before + found.step).all())
    other = mesh.edit(f"{name}[0:2]", add=1.0)
    with pytest.raises(ConflictError, match="later"):
        mesh.undo(edit.id)
    mesh.undo(other.id)
    undo = mesh.undo(edit.id)
    found = mesh.summon(name)
    # Put back as it was at the edit's step: what training made of it since is lost.
    lost = undo.step - edit.step
    assert bool((found[name][1:3] == before + found.step - lost).all())
    mesh.edit(f"{name}[1:3]", add=float(lost))
    assert above_step(mesh) == before


def test_if_step_refuses_when_training_has_gone_on(mesh: Mesh) -> None:
    before = above_step(mesh)

    def comes_late() -> None:
        with mesh.summon("*", writeback=True, hold=False, if_step=True) as params:
            for tensor in params.values():
                tensor.zero_()
            wait_until(lambda: step_of(mesh) > params.step + 1, "it went on", timeout_s=20)

    with pytest.raises(ConflictError, match="step"):
        comes_late()
    assert above_step(mesh) == before


def step_or_why(mesh: Mesh, wanted: int) -> tuple[int, str]:
    """Where an edit for a step was applied, or why it was not."""
    try:
        return mesh.edit("*", add=1.0, if_step=wanted).step, ""
    except ConflictError as error:
        return -1, str(error)


def test_an_edit_for_a_step_is_applied_at_that_step_or_on_no_rank(mesh: Mesh) -> None:
    held = mesh.pause(lease_s=60)
    try:
        for passed in (held.step - 1, held.step + 1):
            with pytest.raises(ConflictError, match=f"if_step is {passed}, .* step {held.step}"):
                mesh.edit("*", add=1.0, if_step=passed)
        assert mesh.edit("*", add=1.0, if_step=held.step).step == held.step
        assert mesh.edit("*", add=-1.0, if_step=held.step).step == held.step
    finally:
        mesh.resume()
    # While it trains, the step of the next common boundary can only be guessed.
    before = above_step(mesh)
    for ahead in range(6):
        wanted = step_of(mesh) + ahead
        step, why = step_or_why(mesh, wanted)
        assert step == wanted or f"if_step is {wanted}, " in why
        if not why:
            mesh.edit("*", add=-1.0)
        assert above_step(mesh) == before


def test_a_hold_steps_as_told_and_ends_with_its_lease(mesh: Mesh) -> None:
    held = mesh.pause(lease_s=20)
    assert held.held
    first = step_of(mesh)
    stepped = mesh.step(3)
    assert [row.step for row in mesh.status()] == [first + 3] * len(mesh.status())
    assert (stepped.state, stepped.steps_left, stepped.step) == ("held", 0, first + 3)
    time.sleep(0.2)
    assert step_of(mesh) == first + 3
    mesh.edit("*", add=0.5)
    mesh.edit("*", add=-0.5)
    assert step_of(mesh) == first + 3
    mesh.resume()
    goes_on(mesh)
    mesh.pause(lease_s=1.5, renew=False)
    wait_until(lambda: mesh.hold_state().state == "running", "the lease ends", timeout_s=20)
    goes_on(mesh)


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
    with mesh.summon("*", writeback=True, hold=False, mode="replace", progress=told) as params:
        for tensor in params.values():
            tensor.fill_(7.0)
"""


def test_a_client_killed_while_its_memory_is_read_changes_nothing(
    mesh: Mesh, state_dir: Path
) -> None:
    before, count = above_step(mesh), len(mesh.edits())
    done = subprocess.run([sys.executable, "-c", KILLED, str(state_dir)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (edit,) = mesh.edits(limit=len(mesh.edits()) - count)
    assert edit.state is EditState.STAGING
    mesh.abort_edit(edit.id)
    assert above_step(mesh) == before
    goes_on(mesh)


def test_a_dry_run_tells_and_changes_nothing(mesh: Mesh) -> None:
    before = above_step(mesh)
    with_step = step_of(mesh)
    edit = mesh.edit("*", mul=2.0, dry_run=True)
    assert edit.state is not EditState.APPLIED
    assert edit.before is not None
    assert edit.after is not None
    assert edit.before.min >= before + with_step
    assert edit.after.max == 2 * edit.before.max
    assert above_step(mesh) == before
