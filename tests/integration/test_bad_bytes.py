"""Bytes that are no messages, and pools that ask for what is not there, over real gRPC."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from paramd import places
from paramd.security.tickets import Role
from tests.integration.client_job import JOB, Job, running_job
from tests.integration.test_client import layout, write_arenas

SIDECAR = "/paramd.v1.SidecarService/"
CONTROL = "/paramd.v1.ControlService/"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        with running_job(layout()) as running:
            write_arenas(running)
            running.update(lambda rank, step: None)
            with grpc.insecure_channel(running.ranks[0].address):
                yield running


def metadata(job: Job, role: Role) -> tuple[tuple[str, str], ...]:
    ticket = job.signer.mint(job=JOB, incarnation=1, role=role, rank=0, ttl_s=60.0)
    return (("authorization", f"Bearer {ticket}"),)


def raw(job: Job, address: str, method: str, data: bytes, role: Role) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_stream(method)
        try:
            for _ in call(data, timeout=5, metadata=metadata(job, role)):
                pass
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined,no-any-return]
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    "method",
    [
        "PoolSnapshot",
        "ComputeStats",
        "PinSnapshot",
        "ReadSnapshot",
        "DigestSnapshot",
        "DeltaSnapshot",
    ],
)
def test_bytes_that_are_no_message_are_refused_by_sidecars(job: Job, method: str) -> None:
    chance = random.Random(method)
    for size in (1, 7, 300, 70_000):
        data = b"\xff" + chance.randbytes(size)
        found = raw(job, job.ranks[0].address, SIDECAR + method, data, Role.READER)
        assert found is grpc.StatusCode.INVALID_ARGUMENT
    assert job.ranks[0].process.poll() is None


@pytest.mark.parametrize(
    ("method", "role"),
    [
        (CONTROL + "Join", Role.SIDECAR),
        (CONTROL + "ScheduleBoundary", Role.READER),
        ("/grpc.health.v1.Health/Check", Role.READER),
        ("/grpc.health.v1.Health/Watch", Role.READER),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Role.READER),
    ],
)
def test_bytes_that_are_no_message_end_only_their_call(job: Job, method: str, role: Role) -> None:
    is_ours = method.startswith(CONTROL)
    addresses = [job.control_address] if is_ours else [job.control_address, job.ranks[0].address]
    for address in addresses:
        for size in (1, 300, 70_000):
            data = b"\xff" + random.Random(size).randbytes(size)
            assert raw(job, address, method, data, role) is grpc.StatusCode.INVALID_ARGUMENT
    assert job.control.poll() is None
    for log in places.job_dir(JOB).rglob("*.log"):
        assert "Traceback" not in log.read_text(), log
