"""Parameters that stay in the trainers' own memory: read at agreed boundaries, else refused.

That training is the same, and every value that of its step, tests/sequences says of kind mirror.
"""

import json
import signal
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file

from paramd.errors import READS_KEY, ConflictError, DeadlineError
from paramd.mesh.mesh import Mesh
from paramd.v1 import sidecar_pb2 as pb
from paramd.v1 import sidecar_pb2_grpc
from tests.multiprocess.striking import ask, helper, rest, stamps, stats_of_stamps, summon_stamps
from tests.multiprocess.test_exports_kinds import environment
from tests.multiprocess.test_faults_trainer import bearer
from tests.multiprocess.truth import connect_to, wait_until


@pytest.fixture(autouse=True)
def mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every trainer of these tests attaches with."""
    monkeypatch.setenv("PARAMD_ARENA", "mirror")


def test_all_doors_lead_to_boundaries_and_none_past_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, views, one tensor, exports, the gateway; free pins; a sidecar killed; the end."""
    for name, value in environment(tmp_path / "out").items():
        monkeypatch.setenv(name, value)
    with stamps(tmp_path) as ranks, connect_to(ranks.state_dir, "stamp") as mesh:
        wait_until(lambda: ask(mesh, summon_stamps()).right, "sidecars join")
        assert_doors_are_right(mesh, tmp_path)
        assert_refused_past_boundaries(mesh)
        helper(ranks, "sidecar", 1).send_signal(signal.SIGKILL)
        wait_until(lambda: ask(mesh, summon_stamps(buffers=True)).right, "the sidecar is back")
        assert_refused_past_boundaries(mesh)
        rest(ranks, tmp_path)
        with pytest.raises(DeadlineError):
            mesh.summon("*", timeout=1.0)
        (tmp_path / "rest").unlink()
        wait_until(lambda: ask(mesh, stats_of_stamps).right, "training goes on")
        rest(ranks, tmp_path)
        ranks[1].process.send_signal(signal.SIGKILL)
        wait_until(lambda: "its own memory and are lost" in refusal(mesh), "it is told")
        ranks[0].process.send_signal(signal.SIGKILL)


def assert_doors_are_right(mesh: Mesh, folder: Path) -> None:
    assert ask(mesh, stats_of_stamps).right
    (name, *_) = [info.name for info in mesh.params("*embed.weight")]
    one = mesh.summon(name)
    assert bool((one[name] == one.step).all())
    with mesh.view("*") as view:
        for shards in view.values():
            assert all(bool((tensor == view.step).all()) for _, tensor in shards)
    mesh.export("here/st", include=["parameters"]).wait(timeout=60)
    step = json.loads((folder / "out" / "st" / "paramd-export.json").read_text())["step"]
    for file in (folder / "out" / "st").glob("*.safetensors"):
        assert all(bool((tensor == step).all()) for tensor in load_file(file).values())
    with pytest.raises(ConflictError, match="cannot be followed"):
        next(iter(mesh.follow("*")))
    document = mesh._mesh._host.reach.document
    # As programs without paramd do, which have a rank gather from the others.
    path = f"/jobs/{mesh.job}?rank=0&gather=true"
    found = mesh._run(mesh._mesh._host.reach._directory.send("GET", path))
    gathering = (*bearer(found["ticket"]), (READS_KEY, found["reads"]))
    with grpc.insecure_channel(document.peers[0].address) as channel:
        stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
        head, *rest_ = stub.Summon(pb.SummonRequest(pattern=name), timeout=20, metadata=gathering)
    data = b"".join(part.data for part in rest_)
    assert bool((torch.frombuffer(bytearray(data), dtype=torch.float32) == head.header.step).all())


def assert_refused_past_boundaries(mesh: Mesh) -> None:
    """Pins made by hand, of what a rank has now and of a later step."""
    document = mesh._mesh._host.reach.document
    for later in (0, 10**9):
        request = pb.PinSnapshotRequest(
            incarnation=document.incarnation,
            layout_digest=document.layout_digest,
            spans=[pb.Span(begin=0, end=4)],
            at_step=later,
        )
        for peer in document.peers.values():
            with grpc.insecure_channel(peer.address) as channel:
                stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
                with pytest.raises(grpc.RpcError) as refused:
                    stub.PinSnapshot(request, timeout=5, metadata=bearer(document.shown(peer.rank)))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "agreed boundaries only" in refused.value.details()


def refusal(mesh: Mesh) -> str:
    answer = ask(mesh, summon_stamps())
    assert not answer.right
    return answer.reason
