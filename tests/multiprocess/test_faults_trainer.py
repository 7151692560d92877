"""Trainers that are stopped, killed, raise or come back: served, refused, fenced."""

import signal
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import psutil
import pytest

from paramd.errors import ParamdError
from paramd.mesh.mesh import Mesh
from paramd.v1 import sidecar_pb2, sidecar_pb2_grpc
from tests.launch import Ranks, start_ranks
from tests.multiprocess.striking import (
    allowed_s,
    ask,
    end_well,
    rest,
    stamps,
    stats_of_stamps,
    summon_stamps,
)
from tests.multiprocess.truth import assert_same_bytes, connect_to, wait_until

SUMMON = summon_stamps()
SAME_HOST = summon_stamps("same-host")


@pytest.mark.timeout(180)
def test_stopped_and_dead_trainers_are_served_and_their_successors_fence_them(
    tmp_path: Path,
) -> None:
    state_dir = tmp_path / "state"
    with stamps(tmp_path, state_dir=state_dir) as first:
        step = rest(first, tmp_path)
        with connect_to(state_dir, "stamp") as mesh:
            # A trainer says itself that it rests, half a second after its update: not once stopped.
            assert_served(mesh, step)
            for rank in first:
                rank.process.send_signal(signal.SIGSTOP)
            assert_served(mesh, step)
            first[1].process.kill()
            wait_until(lambda: phases(mesh)[1] == "orphaned", "its end is noticed")
            assert_served(mesh, step)
            first[0].process.kill()
            wait_until(lambda: phases(mesh) == ["orphaned"] * 2, "the end is noticed")
            assert_served(mesh, step)
            refused = ask(mesh, summon_stamps(buffers=True))
            assert "no further boundary" in refused.reason
            assert refused.seconds < allowed_s()
            old = pinned_by_hand(mesh)
            (tmp_path / "rest").unlink()
            with stamps(tmp_path, state_dir=state_dir) as second:
                assert_outdated(mesh)
                with connect_to(state_dir, "stamp") as successor:
                    assert successor.incarnation == 2
                    assert ask(successor, SUMMON).right
                    assert_fenced(successor, old)
                end_well(second, tmp_path)


def assert_served(mesh: Mesh, step: int) -> None:
    for request in (SUMMON, SAME_HOST, stats_of_stamps):
        answer = ask(mesh, request)
        assert (answer.right, answer.step) == (True, step), answer
        assert answer.seconds < allowed_s()


def assert_outdated(mesh: Mesh) -> None:
    """The job has another control plane and token by now: told in time, never wrong."""
    answer = ask(mesh, SUMMON)
    assert not answer.right
    assert answer.seconds < allowed_s(), answer
    print(f"client of the old incarnation refused after {answer.seconds:.2f} s: {answer.reason}")


def phases(mesh: Mesh) -> list[str]:
    return [row.phase for row in mesh.status()]


def pinned_by_hand(mesh: Mesh) -> tuple[str, str, str]:
    """Pins rank 0's first bytes; returns address, ticket and snapshot id."""
    document = mesh._mesh._host.reach.document
    peer = document.peers[0]
    request = sidecar_pb2.PinSnapshotRequest(
        incarnation=document.incarnation,
        layout_digest=document.layout_digest,
        spans=[sidecar_pb2.Span(begin=0, end=4)],
        lease_ms=60_000,
    )
    with grpc.insecure_channel(peer.address) as channel:
        stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
        found = stub.PinSnapshot(request, timeout=5, metadata=bearer(document.shown(0)))
    return peer.address, document.shown(0), found.snapshot_id


def bearer(ticket: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {ticket}"),)


def assert_fenced(mesh: Mesh, old: tuple[str, str, str]) -> None:
    """Neither the old ticket nor the old snapshot is good for anything any more."""
    _, old_ticket, snapshot_id = old
    document = mesh._mesh._host.reach.document
    request = sidecar_pb2.ReadSnapshotRequest(snapshot_id=snapshot_id)
    plan = sidecar_pb2.PinSnapshotRequest(incarnation=1, layout_digest=document.layout_digest)
    expected = (
        (request, old_ticket, "ReadSnapshot", {"UNAUTHENTICATED", "PERMISSION_DENIED"}),
        (request, document.shown(0), "ReadSnapshot", {"NOT_FOUND"}),
        (plan, document.shown(0), "PinSnapshot", {"FAILED_PRECONDITION"}),
    )
    with grpc.insecure_channel(document.peers[0].address) as channel:
        stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
        for message, ticket, method, codes in expected:
            call = getattr(stub, method)
            with pytest.raises(grpc.RpcError) as refused:
                list(call(message, timeout=5, metadata=bearer(ticket)))
            assert refused.value.code().name in codes


@pytest.mark.timeout(120)
def test_a_trainer_killed_inside_an_update_is_torn(tmp_path: Path) -> None:
    with stamps(tmp_path) as ranks, connect_to(ranks.state_dir, "stamp") as mesh:
        assert ask(mesh, SUMMON).right
        (tmp_path / "die-1").touch()
        wait_until(lambda: ranks[1].process.poll() == -signal.SIGKILL, "rank 1 dies")
        wait_until(lambda: phases(mesh)[1] == "torn", "it is known as torn", timeout_s=allowed_s())
        for request in (SUMMON, SAME_HOST, stats_of_stamps, summon_stamps(buffers=True)):
            answer = ask(mesh, request)
            assert not answer.right
            # The other rank's training fails at its next collective, and may say so first.
            told = ("inside an update", "torn", "the trainer has ended")
            assert any(text in answer.reason for text in told), answer
            assert answer.seconds < allowed_s()
            print(f"refused after {answer.seconds:.2f} s: {answer.reason}")


@pytest.mark.timeout(120)
def test_an_update_that_raised_is_refused_until_it_is_done(tmp_path: Path) -> None:
    with stamps(tmp_path) as ranks, connect_to(ranks.state_dir, "stamp") as mesh:
        (tmp_path / "raise-1").touch()
        ranks.wait_for_text("raised", rank=1)
        # Rank 0 waits at rest meanwhile; on a busy machine its reason may be the first to come.
        with pytest.raises(ParamdError, match=r"inside an update|idle after an update"):
            mesh.summon("*", timeout=2)
        (tmp_path / "again").touch()
        wait_until(lambda: ask(mesh, SUMMON).right, "the next good update", timeout_s=allowed_s())
        end_well(ranks, tmp_path)


@pytest.mark.timeout(120)
def test_forked_workers_that_outlive_their_trainer_keep_nothing_from_its_successor(
    tmp_path: Path,
) -> None:
    die, state_dir = tmp_path / "die", tmp_path / "state"
    with start_forking(die, state_dir) as first:
        child = psutil.Process(int(first.wait_for_text("child", rank=0).split()[-1]))
        with connect_to(state_dir, "forking") as mesh:
            before = mesh.summon("*")
            die.touch()
            wait_until(lambda: phases(mesh) == ["orphaned"], "the end is noticed")
            assert child.is_running(), "nobody was left to hold what it inherited"
            found = mesh.summon("*")
            assert (found.incarnation, found.step) == (1, 3)
            assert_same_bytes(found, before)
        die.unlink()
        with start_forking(die, state_dir) as second:
            text = second.wait_for_text("child", rank=0)
            assert text.startswith("run 2 step 3")
            print(f"the successor: {text}", end="")
            assert float(text.split()[5]) < allowed_s()
            assert child.is_running()
            with connect_to(state_dir, "forking") as mesh:
                assert (mesh.incarnation, mesh.summon("*").step) == (2, 3)


def start_forking(die: Path, state_dir: Path) -> AbstractContextManager[Ranks]:
    worker = "tests.multiprocess.workers.forking"
    return start_ranks(worker, 1, args=["--die", str(die)], state_dir=state_dir)
