"""Edits while parts of the job are killed and stopped at named points: all or none, told true."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from paramd.errors import ConflictError, ParamdError
from paramd.memory.edit_program import MAGIC
from paramd.mesh.edits.calls import Edit, EditCalls, EditState
from paramd.mesh.mesh import Mesh
from paramd.trainer.faults import ATTACH_POINTS
from paramd.trainer.faults import POINTS as TRAINER_FAULTS
from paramd_service.sidecar.faults import POINTS as SIDECAR_FAULTS
from tests.launch import Ranks
from tests.leaks import open_files
from tests.longer import sample
from tests.multiprocess.edit_matrix import (
    CELLS,
    KINDS,
    SIDECAR_POINTS,
    TRAINER_POINTS,
    Cell,
    run,
    settled,
    strike,
    try_edit,
)
from tests.multiprocess.frozen import edit_to, frozen
from tests.multiprocess.striking import allowed_s, helper
from tests.multiprocess.truth import connect_to, wait_until

# Those that end the job: the others are one after the other in a job of another kind, below.
SAMPLE = ("ddp-2-applied-kill", "fsdp1-full-orig-2-agreed-kill", "tp-fsdp2-4-applying-kill")
CHOSEN = sample(CELLS, [cell for cell in CELLS if str(cell) in SAMPLE])


def test_the_matrix_has_every_point_on_every_kind() -> None:
    assert {cell.point for cell in CELLS} == (TRAINER_FAULTS - ATTACH_POINTS) | {
        point for point in SIDECAR_FAULTS if point.startswith("edit-")
    }
    assert len(set(map(str, CELLS))) == len(CELLS) == len(KINDS) * 7 * 2


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cell", CHOSEN, ids=str)
def test_a_cell_of_the_matrix_leaves_all_or_none_and_is_told_true(
    cell: Cell, tmp_path: Path
) -> None:
    print(f"{cell}: {run(cell, tmp_path)}")


@pytest.mark.timeout(300)
def test_whoever_is_struck_at_a_point_and_goes_on_leaves_all_or_none(tmp_path: Path) -> None:
    """Sidecars killed and stopped, trainers stopped, the control plane killed."""
    with frozen(tmp_path, "fsdp2", 2) as ranks, connect_to(ranks.state_dir, "frozen") as mesh:
        value = 0
        strikes = [("kill", point) for point in SIDECAR_POINTS]
        strikes += [("stop", point) for point in SIDECAR_POINTS + TRAINER_POINTS]
        for index, (action, point) in enumerate(strikes):
            # Values divisible by two travel as data; those by four over gRPC alone.
            new = 4 * (index + 1) + 2
            cell = Cell(kind="fsdp2", world_size=2, point=point, action=action)
            value = strike(cell, ranks, tmp_path, mesh, value, new)
            print(f"{cell}: {value}")
        control = helper(ranks, "control")
        worker = threading.Thread(target=try_edit, args=(mesh, 97))
        worker.start()
        wait_until(partial(known, mesh, 97), "the edit is known", timeout_s=20)
        control.kill()
        worker.join()
        wait_until(lambda: answers(mesh), "a new control plane", timeout_s=allowed_s(20))
        value = settled(mesh, value, 97)
        edit_to(mesh, 99)
        assert settled(mesh, value, 99) == 99


def known(mesh: Mesh, value: int) -> bool:
    """Whether the control plane has heard of the edit."""
    try:
        return any(op.get("value") == value or op.get("data") for op in mesh.edits(limit=1)[0].ops)
    except (ParamdError, IndexError):
        return False


def answers(mesh: Mesh) -> bool:
    try:
        mesh.edits(limit=1)
    except ParamdError:
        return False
    return True


CLIENT = """
import sys, torch, paramd
with paramd.connect(sys.argv[1], sys.argv[2]) as mesh:
    tensors = {i.name: torch.full(i.shape, 5.0) for i in mesh.params("*")}
    def told(sent, total):
        print("sending", flush=True)
        sys.stdin.read()
    mesh.edit(set=tensors, progress=told)
"""


@pytest.mark.timeout(120)
def test_a_client_killed_while_it_sends_and_a_program_that_cannot_run_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with frozen(tmp_path, "fsdp1-full", 2) as ranks, connect_to(ranks.state_dir, "frozen") as mesh:
        a_client_is_killed(ranks, mesh)
        a_program_cannot_run(ranks, mesh, monkeypatch)


def a_client_is_killed(ranks: Ranks, mesh: Mesh) -> None:
    endpoint = json.loads((ranks.state_dir / "frozen" / "endpoint.json").read_text())
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, endpoint["url"], endpoint["token"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "sending\n"
        client.kill()
    edit_to(mesh, 7)
    found = mesh.summon("*")
    assert all(bool((tensor == 7).all()) for tensor in found.values())
    states = [row.state for row in mesh.edits()]
    assert states[0] is EditState.APPLIED
    assert EditState.APPLIED not in states[1:]


def a_program_cannot_run(ranks: Ranks, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that finds it spoiled refuses it with the reason."""
    edit_to(mesh, 2)
    tensors = {info.name: torch.full(info.shape, 4.0) for info in mesh.params("*")}
    commit = EditCalls.commit

    async def spoiled(calls: EditCalls, edit_id: str, deadline_s: float) -> Edit:
        assert spoil_programs(ranks[1].process.pid)
        return await commit(calls, edit_id, deadline_s)

    with monkeypatch.context() as patch:
        patch.setattr(EditCalls, "commit", spoiled)
        with pytest.raises(ConflictError, match="cannot carry it out"):
            mesh.edit(set=tensors)
    (edit,) = mesh.edits(limit=1)
    assert edit.state is EditState.ABORTED
    assert "cannot carry it out" in edit.reason
    assert settled(mesh, 2, 4) == 2
    edit_to(mesh, 6)
    assert settled(mesh, 2, 6) == 6


def spoil_programs(pid: int) -> int:
    """Zeroes the head of every edit program in a trainer's memory of edits; how many."""
    path = next(link for link, target in open_files(pid).items() if "paramd-edits" in target)
    magic, count = MAGIC.to_bytes(8, "little"), 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(magic)
        while at >= 0:
            memory[at : at + 8] = bytes(8)
            count += 1
            at = memory.find(magic, at)
    return count
