"""Edits under faults, as data: every kind, every named point, killed and stopped.

    for cell in CELLS:
        print(run(cell, folder))    # starts a job; fails when ranks differ, or a lie is told

What may never happen: that some ranks have an edit and others have not, and that what is told
of it is not what the ranks hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import httpx2
import psutil

from paramd import places
from paramd.errors import ParamdError
from paramd.mesh.edits.calls import EDIT_ENDS, Edit, EditState
from paramd.mesh.mesh import Mesh
from paramd.trainer import faults
from tests.launch import Ranks
from tests.multiprocess.frozen import edit_to, frozen
from tests.multiprocess.striking import allowed_s, arm, helper, is_down
from tests.multiprocess.truth import connect_to, wait_until

# With replicas, with shards, with both; a flat parameter has padding that no edit reaches.
KINDS = (("ddp", 2), ("fsdp1-full-orig", 2), ("tp-fsdp2", 4))
SIDECAR_POINTS = ("edit-staging", "edit-staged", "edit-ready", "edit-applied")
TRAINER_POINTS = ("agreed", "applying", "applied")
ACTIONS = ("kill", "stop")

ENDING_S = 2.0
"""From its last socket closed until a killed process counts as ended, on a busy machine."""

STOPPED_S = 2.0
"""Long enough for the control plane to notice and to act on it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is done to whom while a job of a kind is edited."""

    kind: str
    world_size: int
    point: str
    action: str

    @property
    def of_trainer(self) -> bool:
        return self.point in faults.POINTS

    @property
    def ends_job(self) -> bool:
        """A trainer is killed: no rank goes on for long."""
        return self.of_trainer and self.action == "kill"

    @property
    def rank(self) -> int:
        """Who is struck: the last rank, but rank 0 for what only one of two replicas does."""
        return 0 if self.point in ("edit-staged", "edit-applied") else self.world_size - 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.world_size}-{self.point}-{self.action}"


CELLS = tuple(
    Cell(kind=kind, world_size=world_size, point=point, action=action)
    for (kind, world_size), point, action in product(
        KINDS, SIDECAR_POINTS + TRAINER_POINTS, ACTIONS
    )
)


def run(cell: Cell, folder: Path) -> str:
    """A job of its own that is edited and struck; what came of it, in words."""
    with (
        frozen(folder, cell.kind, cell.world_size, ends_well=not cell.ends_job) as ranks,
        connect_to(ranks.state_dir, "frozen") as mesh,
    ):
        edit_to(mesh, 2)
        value = strike(cell, ranks, folder, mesh, 2, 6)
        if cell.ends_job:
            return told_after_death(mesh, 2, 6)
        # Odd values travel without data.
        edit_to(mesh, 9)
        assert settled(mesh, value, 9) == 9
        return f"the ranks hold {value}, and 9 after it"


def strike(cell: Cell, ranks: Ranks, folder: Path, mesh: Mesh, old: int, new: int) -> int:
    """Edits `old` to `new` and strikes; what all ranks hold then. -1: they are not asked."""
    wait_until(partial(is_whole, ranks, mesh), "all ranks are there", timeout_s=allowed_s(20))
    process, rule = _armed(cell, ranks, folder)
    ended = threading.Event()

    def work() -> None:
        try_edit(mesh, new, timeout_s=15.0 if cell.ends_job else 30.0)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        _wait_for(lambda: is_down(process), ended, f"{rule} of rank {cell.rank}", mesh)
        if cell.action == "stop":
            worker.join(timeout=STOPPED_S)
            process.resume()
    finally:
        worker.join()
    return -1 if cell.ends_job else settled(mesh, old, new)


def _armed(cell: Cell, ranks: Ranks, folder: Path) -> tuple[psutil.Process, str]:
    rule = f"{cell.point}:{cell.action}"
    if not cell.of_trainer:
        process = helper(ranks, "sidecar", cell.rank)
        arm(folder / "faults", cell.rank, rule)
        return process, rule
    part = folder / "faults" / f"part-{cell.rank}"
    part.write_text(rule)
    part.replace(folder / "faults" / f"rank-{cell.rank}")
    return psutil.Process(ranks[cell.rank].process.pid), rule


def _wait_for(struck: Callable[[], bool], ended: threading.Event, what: str, mesh: Mesh) -> None:
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


def told_after_death(mesh: Mesh, old: int, new: int) -> str:
    """What is told of the last edit after a trainer died, compared with what can be read."""
    edit = last_edit(mesh, allowed_s(20))
    assert edit.ended, f"{edit!r} has not come to an end"
    try:
        values = {float(v) for t in mesh.summon("*").values() for v in t.float().unique()}
    except ParamdError as error:
        return f"{edit!r}; reading is refused: {str(error)[:100]}"
    true = {EditState.APPLIED: {new}, EditState.ABORTED: {old}}.get(edit.state)
    assert len(values) == 1, f"{edit!r}, and the ranks hold {values}"
    assert true in (None, values), f"{edit!r}, but the ranks hold {values}"
    return f"{edit!r}; the ranks hold {values}"


def last_edit(mesh: Mesh, wait_s: float) -> Edit:
    (edit,) = mesh.edits(limit=1)
    return mesh.get_edit(edit.id, wait=True, timeout=wait_s)
