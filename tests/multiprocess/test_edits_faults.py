"""Edits while parts of the job are killed and stopped at named points: all or none, told true."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from paramd.errors import ConflictError, ParamdError
from paramd.memory.edit_program import MAGIC
from paramd.mesh.editing.calls import EditCalls
from paramd.mesh.editing.results import TERMINAL, Edit, EditState
from paramd.mesh.mesh import Mesh
from tests.launch import Ranks
from tests.multiprocess.frozen import edit_to, frozen
from tests.multiprocess.striking import allowed_s, arm, helper, is_down
from tests.multiprocess.truth import connect_to, wait_until

POINTS = ("edit-staging", "edit-staged", "edit-ready", "edit-applied")


def try_edit(mesh: Mesh, value: int, timeout_s: float = 30.0) -> None:
    """Edits; every end is fine, as long as it is one of ours."""
    try:
        edit_to(mesh, value, timeout_s=timeout_s)
    except ParamdError as error:
        print(f"  {value}: {type(error).__name__}: {str(error)[:100]}")


def settled(mesh: Mesh, old: int, new: int) -> int:
    """Waits until the last edit has ended, and checks that all ranks hold what it says."""
    deadline_s = time.monotonic() + allowed_s(20)
    while True:
        assert time.monotonic() < deadline_s, "the edit did not come to an end"
        try:
            (edit,) = mesh.edits(limit=1)
            edit = mesh.get_edit(edit.id, wait=True, timeout=5)
            if edit.state not in TERMINAL:
                continue
            found = mesh.summon("*")
        except ParamdError:
            time.sleep(0.1)
            continue
        values = {float(v) for tensor in found.values() for v in tensor.float().unique()}
        expected = new if edit.state is EditState.APPLIED else old
        assert values == {expected}, f"{edit!r}, but the ranks hold {values}"
        return expected


def strike(ranks: Ranks, folder: Path, rank: int, rule: str, work: Callable[[], None]) -> None:
    """Runs `work` while a rank's sidecar is armed, until it has struck itself."""
    process = helper(ranks, "sidecar", rank)
    arm(folder / "faults", rank, rule)
    worker = threading.Thread(target=work)
    worker.start()
    wait_until(lambda: is_down(process), f"{rule} of rank {rank}", timeout_s=allowed_s(15))
    if rule.endswith("stop"):
        # Long enough for the control plane to notice and to act on it.
        worker.join(timeout=2.0)
        process.send_signal(signal.SIGCONT)
    worker.join()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_sidecar_struck_at_a_point_leaves_all_or_none(action: str, tmp_path: Path) -> None:
    with (
        frozen(tmp_path, "fsdp2", 2) as ranks,
        connect_to(ranks.state_dir, "frozen") as mesh,
    ):
        value = 0
        for index, point in enumerate(POINTS):
            # Values divisible by two travel as data; those by four over gRPC alone.
            new = 4 * (index + 1) + 2
            strike(ranks, tmp_path, index % 2, f"{point}:{action}", partial(try_edit, mesh, new))
            value = settled(mesh, value, new)
            print(f"{point}:{action}: {value}")
        edit_to(mesh, 99)
        assert settled(mesh, value, 99) == 99


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("ddp", 2), ("fsdp1-full", 2), ("fsdp1-full-orig", 2), ("hsdp", 4), ("tp-fsdp2", 4),
     ("tp-ddp", 4)],
)  # fmt: skip
def test_a_sidecar_of_any_kind_killed_when_ready_leaves_all_or_none(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    with (
        frozen(tmp_path, kind, world_size) as ranks,
        connect_to(ranks.state_dir, "frozen") as mesh,
    ):
        value = 0
        for rank, new, point in ((world_size - 1, 6, "edit-ready"), (0, 9, "edit-applied")):
            strike(ranks, tmp_path, rank, f"{point}:kill", partial(try_edit, mesh, new))
            value = settled(mesh, value, new)
            print(f"{kind} {point}: {value}")


@pytest.mark.timeout(200)
def test_a_control_plane_killed_under_edits_finds_the_truth(tmp_path: Path) -> None:
    with (
        frozen(tmp_path, "ddp", 2) as ranks,
        connect_to(ranks.state_dir, "frozen") as mesh,
    ):
        value = 0
        for round_ in range(3):
            new = 10 + round_
            control = helper(ranks, "control")
            worker = threading.Thread(target=try_edit, args=(mesh, new))
            worker.start()
            wait_until(partial(known, mesh, new), "the edit is known", timeout_s=20)
            control.kill()
            worker.join()
            wait_until(lambda: answers(mesh), "a new control plane", timeout_s=allowed_s(20))
            value = settled(mesh, value, new)


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
    tensors = {i.fqn: torch.full(i.shape, 5.0) for i in mesh.params("*")}
    def told(sent, total):
        print("sending", flush=True)
        sys.stdin.read()
    mesh.edit(set=tensors, progress=told)
"""


@pytest.mark.timeout(120)
def test_a_client_killed_while_it_sends_changes_nothing(tmp_path: Path) -> None:
    with (
        frozen(tmp_path, "fsdp1-full", 2) as ranks,
        connect_to(ranks.state_dir, "frozen") as mesh,
    ):
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


@pytest.mark.timeout(120)
def test_a_program_that_a_trainer_cannot_run_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        frozen(tmp_path, "fsdp2", 2) as ranks,
        connect_to(ranks.state_dir, "frozen") as mesh,
    ):
        edit_to(mesh, 2)
        tensors = {info.fqn: torch.full(info.shape, 4.0) for info in mesh.params("*")}

        commit = EditCalls.commit

        async def spoiled(calls: EditCalls, edit_id: str, deadline_s: float) -> Edit:
            assert spoil_programs(ranks[1].process.pid)
            return await commit(calls, edit_id, deadline_s)

        with monkeypatch.context() as patch:
            patch.setattr(EditCalls, "commit", spoiled)
            with pytest.raises(ConflictError, match="cannot run the edit's program"):
                mesh.edit(set=tensors)
        (edit,) = mesh.edits(limit=1)
        assert edit.state is EditState.ABORTED
        assert "cannot run the edit's program" in edit.reason
        assert settled(mesh, 2, 4) == 2
        edit_to(mesh, 6)
        assert settled(mesh, 2, 6) == 6


def spoil_programs(pid: int) -> int:
    """Zeroes the head of every edit program in a trainer's memory of edits; how many."""
    descriptors = Path(f"/proc/{pid}/fd")
    path = next(p for p in descriptors.iterdir() if "paramd-edits" in os.readlink(p))
    magic, count = MAGIC.to_bytes(8, "little"), 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(magic)
        while at >= 0:
            memory[at : at + 8] = bytes(8)
            count += 1
            at = memory.find(magic, at)
    return count


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", ["agreed", "applying"])
def test_a_trainer_killed_before_it_applied_never_makes_the_edit_applied(
    point: str, tmp_path: Path
) -> None:
    with (
        frozen(tmp_path, "hsdp", 4, ends_well=False) as ranks,
        connect_to(ranks.state_dir, "frozen") as mesh,
    ):
        edit_to(mesh, 1)
        (tmp_path / "faults" / "rank-1").write_text(f"{point}:kill")
        try_edit(mesh, 3, timeout_s=15)
        wait_until(lambda: ranks[1].process.poll() is not None, "rank 1 has ended", timeout_s=20)
        edit = mesh.get_edit(mesh.edits(limit=1)[0].id, wait=True, timeout=allowed_s(10))
        print(f"{point}: {edit!r}")
        assert edit.state in (EditState.LOST, EditState.ABORTED)
        # What can still be read holds one value, or is refused.
        try:
            values = {float(v) for t in mesh.summon("*").values() for v in torch.unique(t)}
        except ParamdError as error:
            print(f"  refused: {str(error)[:100]}")
        else:
            assert len(values) == 1
