"""Wrong requests to a real job: a clear error that names the next step; training untouched."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
import torch

import paramd
from paramd.errors import DeniedError, NotFoundError, UnreachableError, UsageError
from paramd.mesh.mesh import Mesh
from paramd.security import tickets
from paramd.v1 import sidecar_pb2, sidecar_pb2_grpc
from tests.multiprocess.striking import ask, end_well, stamps, summon_stamps
from tests.multiprocess.test_faults_trainer import bearer
from tests.multiprocess.truth import connect_to

WRONG = [
    ("norm.wieght", {}, NotFoundError, "norm.weight"),
    ("nothing.like.that.*", {}, NotFoundError, "'*' lists all"),
    ("norm.weight[0:99]", {}, UsageError, "norm.weight"),
    ("norm.weight[:, 0:1]", {}, UsageError, "at most 1 slice"),
    ("*", {"transport": "carrier-pigeon"}, UsageError, "grpc"),
    ("*", {"timeout": -1.0}, UsageError, "more than 0"),
    ("norm.weight", {"into": {"norm.weight": torch.empty(3)}}, UsageError, "norm.weight"),
    ("norm.weight", {"into": {"other": torch.empty(7)}}, UsageError, "other"),
]


@pytest.mark.timeout(120)
def test_wrong_requests_are_told_what_to_do_and_training_goes_on(tmp_path: Path) -> None:
    with stamps(tmp_path) as ranks, connect_to(ranks.state_dir, "stamp") as mesh:
        first = ask(mesh, summon_stamps())
        for pattern, options, kind, text in WRONG:
            with pytest.raises(kind) as refused:
                mesh.summon(pattern, **options)  # type: ignore[arg-type]
            assert text in str(refused.value), (pattern, str(refused.value))
        assert_strangers_are_denied(mesh, ranks.state_dir)
        last = ask(mesh, summon_stamps())
        assert last.right, last
        assert last.step > first.step
        end_well(ranks, tmp_path)


def assert_strangers_are_denied(mesh: Mesh, state_dir: Path) -> None:
    """A wrong token at the door, a foreign ticket at a sidecar, a job that is not there."""
    endpoint = json.loads((state_dir / "stamp" / "endpoint.json").read_text())
    with pytest.raises(DeniedError, match="token"):
        paramd.connect(endpoint["url"], "wrong" * 8)
    with pytest.raises((NotFoundError, UnreachableError), match="stamp"):
        paramd.connect(endpoint["url"], endpoint["token"], job="stmap")
    document = mesh._mesh._reach.document
    stranger = tickets.Signer(tickets.new_private_key())
    forged = stranger.mint(job="stamp", incarnation=1, role=tickets.Role.READER, ttl_s=60)
    with grpc.insecure_channel(document.peers[0].address) as channel:
        stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
        for ticket in (forged, endpoint["token"], ""):
            with pytest.raises(grpc.RpcError) as refused:
                stub.GetState(sidecar_pb2.GetStateRequest(), timeout=5, metadata=bearer(ticket))
            assert refused.value.code().name in ("UNAUTHENTICATED", "PERMISSION_DENIED")
