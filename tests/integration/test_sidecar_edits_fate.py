"""What a respawned sidecar says of requests that its predecessor was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paramd.memory.control_page import Word, note_agreed
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.edit_trainer import FILL_B, Editing, editing
from tests.integration.sidecar_process import SidecarProcess, wait_until

INCARNATION = 1


@contextmanager
def respawned(folder: Path, one: Editing, process: SidecarProcess) -> Iterator[Editing]:
    process.process.kill()
    process.process.wait(timeout=10)
    successor = SidecarProcess(folder)
    try:
        successor.wait_until_started()
        with editing(successor, back=one.trainer.fds) as again:
            yield again
    finally:
        successor.end()


def fate(one: Editing, boundary: int) -> int:
    request = pb.WithdrawBoundaryRequest(incarnation=INCARNATION, boundary=boundary)
    return int(one.call("WithdrawBoundary", request).fate)


def promised(one: Editing, number: int, boundary: int) -> object:
    """An edit is staged and asked for, and its trainer has begun to take part.

    Returns the call under way, which ends when nobody has it any more.
    """
    one.stage(one.manifest(number, FILL_B))
    asked = one.reach(number, boundary)
    wait_until(lambda: one.page[Word.READY] == boundary, "the rank is ready")
    one.page[Word.PROMISED] = boundary
    return asked


def test_a_promise_is_in_doubt_until_its_round_has_ended(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    process = SidecarProcess(tmp_path)
    process.wait_until_started()
    try:
        with editing(process) as one:
            _asked = promised(one, 1, 5)
            with respawned(tmp_path, one, process) as again:
                assert fate(again, 5) == pb.BOUNDARY_FATE_IN_DOUBT
                assert again.progress(1).phase == pb.EDIT_PHASE_READY
                again.page[Word.PROMISED] = 0
                assert fate(again, 5) == pb.BOUNDARY_FATE_WITHDRAWN
                # Once withdrawn it is free for another request, which is applied.
                assert again.commit(1, 6).captured
                assert fate(again, 6) == pb.BOUNDARY_FATE_DONE
                assert bool((again.b == 0.5).all())
    finally:
        process.end()


def test_old_requests_are_told_after_later_ones_were_agreed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    process = SidecarProcess(tmp_path)
    process.wait_until_started()
    try:
        with editing(process) as one:
            one.stage(one.manifest(1, FILL_B))
            assert one.commit(1, 5).captured
            _asked = promised(one, 2, 7)
            with respawned(tmp_path, one, process) as again:
                # The round of 7 ends unagreed; the next ones bring two more requests.
                again.page[Word.PROMISED] = 0
                for nth, number in ((2, 9), (3, 11)):
                    note_agreed(again.page.words, nth, number)
                    again.page[Word.AGREED] = number
                assert fate(again, 5) == pb.BOUNDARY_FATE_DONE
                assert fate(again, 7) == pb.BOUNDARY_FATE_WITHDRAWN
                assert fate(again, 9) == pb.BOUNDARY_FATE_DONE
                assert fate(again, 10) == pb.BOUNDARY_FATE_WITHDRAWN
                assert again.progress(1).phase == pb.EDIT_PHASE_APPLIED
                assert again.progress(2).phase == pb.EDIT_PHASE_STAGED
    finally:
        process.end()
