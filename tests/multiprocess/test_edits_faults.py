"""Edits while parts of the job are killed and stopped at named points: all or none, told true.

What may never happen: that some ranks have an edit and others have not, and that what is told
of it is not what the ranks hold. The soak does so on every kind of model.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx2
import psutil
import pytest

from paramd import places
from paramd.errors import ParamdError
from paramd.mesh.edits.calls import EDIT_ENDS, Edit, EditState
from paramd.mesh.mesh import Mesh
from paramd.trainer import faults as trainer_faults
from paramd_service.sidecar import faults as sidecar_faults
from tests.launch import Ranks
from tests.longer import share
from tests.multiprocess.frozen import edit_to, frozen
from tests.multiprocess.striking import allowed_s, arm, helper, is_down
from tests.multiprocess.truth import connect_to, wait_until

SIDECAR_POINTS = sorted(p for p in sidecar_faults.POINTS if p.startswith("edit-"))
TRAINER_POINTS = sorted(trainer_faults.POINTS - trainer_faults.ATTACH_POINTS)

ENDS_JOB = [f"{point}:kill" for point in TRAINER_POINTS]
"""A trainer is killed: no rank goes on for long."""

ENDING_S = 2.0
"""From its last socket closed until a killed process counts as ended, on a busy machine."""

STOPPED_S = 2.0
"""Long enough for the control plane to notice and to act on it."""


@pytest.mark.in_turns
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "world_size", "point"),
    [("ddp", 2, "applied"), ("fsdp1-full-orig", 2, "agreed"), ("tp-fsdp2", 4, "applying")],
)
def test_a_trainer_killed_at_a_point_leaves_all_or_none_and_is_told_true(
    kind: str, world_size: int, point: str, tmp_path: Path
) -> None:
    with (
        frozen(tmp_path, kind, world_size, ends_well=False) as ranks,
        connect_to(ranks.state_dir, "frozen") as mesh,
    ):
        edit_to(mesh, 2)
        strike(f"{point}:kill", ranks, tmp_path, mesh, 6)
        told_after_death(mesh, 2, 6)


@pytest.mark.timeout(300)
def test_whoever_is_struck_at_a_point_and_goes_on_leaves_all_or_none(tmp_path: Path) -> None:
    """Sidecars killed and stopped, trainers stopped, the control plane killed."""
    with frozen(tmp_path, "fsdp2", 2) as ranks, connect_to(ranks.state_dir, "frozen") as mesh:
        value, rules = 0, [f"{point}:kill" for point in SIDECAR_POINTS]
        rules += [f"{point}:stop" for point in SIDECAR_POINTS + TRAINER_POINTS]
        for index, rule in enumerate(share(rules, 2)):
            # Even, so it travels as data; not divisible by four, so over gRPC.
            new = 4 * (index + 1) + 2
            strike(rule, ranks, tmp_path, mesh, new)
            value = settled(mesh, value, new)
            print(f"{rule}: {value}")
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


def strike(rule: str, ranks: Ranks, folder: Path, mesh: Mesh, new: int) -> None:
    """Edits to `new`, while a rank's trainer or sidecar strikes itself by that rule."""
    wait_until(partial(is_whole, ranks, mesh), "all ranks are there", timeout_s=allowed_s(20))
    point, _, action = rule.partition(":")
    # The last rank, but rank 0 for what only one of two replicas does.
    rank = 0 if point in ("edit-staged", "edit-applied") else len(list(ranks)) - 1
    if point in SIDECAR_POINTS:
        process = helper(ranks, "sidecar", rank)
        arm(folder / "faults", rank, rule)
    else:
        process = psutil.Process(ranks[rank].process.pid)
        part = folder / "faults" / f"part-{rank}"
        part.write_text(rule)
        part.replace(folder / "faults" / f"rank-{rank}")
    ended = threading.Event()

    def work() -> None:
        try_edit(mesh, new, timeout_s=15.0 if rule in ENDS_JOB else 30.0)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        wait_for(lambda: is_down(process), ended, f"{rule} of rank {rank}", mesh)
        if action == "stop":
            worker.join(timeout=STOPPED_S)
            process.resume()
    finally:
        worker.join()


def wait_for(struck: Callable[[], bool], ended: threading.Event, what: str, mesh: Mesh) -> None:
    """Waits for the strike; an edit that has ended without one will never pass the point."""
    deadline_s = time.monotonic() + allowed_s(15)
    while not struck():
        if ended.is_set():
            # A killed process closes its sockets, which ends the edit, before it counts as ended.
            deadline_s = min(deadline_s, time.monotonic() + ENDING_S)
            ended.clear()
        over = time.monotonic() > deadline_s
        assert not over or struck(), f"not struck: {what}; the last edit: {mesh.edits(limit=1)}"
        time.sleep(0.01)


def is_whole(ranks: Ranks, mesh: Mesh) -> bool:
    """Whether every sidecar answers, and the control plane knows it by the same address.

    Replicas stand in for each other when they are read, not when they are edited: an edit that
    comes while a killed sidecar is being replaced is refused, and passes no further point.
    """
    endpoint = places._load(ranks.state_dir / "frozen" / places.ENDPOINT_FILE)
    if endpoint is None:
        return False
    headers = {"authorization": f"Bearer {endpoint.token}"}
    try:
        told = httpx2.get(f"{endpoint.url}/api/v1/jobs/frozen", headers=headers, trust_env=False)
        return told.json().get("state") == "ok" and not any(row.reason for row in mesh.status())
    except (httpx2.TransportError, ParamdError):
        return False


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
            edit = last_edit(mesh, 5)
            if edit.state not in EDIT_ENDS:
                continue
            found = mesh.summon("*")
        except ParamdError:
            time.sleep(0.1)
            continue
        values = {float(v) for tensor in found.values() for v in tensor.float().unique()}
        expected = new if edit.state is EditState.APPLIED else old
        assert values == {expected}, f"{edit!r}, but the ranks hold {values}"
        return expected


def told_after_death(mesh: Mesh, old: int, new: int) -> None:
    """What is told of the last edit after a trainer died, compared with what can be read."""
    edit = last_edit(mesh, allowed_s(20))
    assert edit.ended, f"{edit!r} has not come to an end"
    try:
        values = {float(v) for t in mesh.summon("*").values() for v in t.float().unique()}
    except ParamdError as error:
        print(f"{edit!r}; reading is refused: {str(error)[:100]}")
        return
    true = {EditState.APPLIED: {new}, EditState.ABORTED: {old}}.get(edit.state)
    assert len(values) == 1, f"{edit!r}, and the ranks hold {values}"
    assert true in (None, values), f"{edit!r}, but the ranks hold {values}"


def last_edit(mesh: Mesh, wait_s: float) -> Edit:
    (edit,) = mesh.edits(limit=1)
    return mesh.get_edit(edit.id, wait=True, timeout=wait_s)
