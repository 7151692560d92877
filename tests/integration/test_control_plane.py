"""The embedded control plane as a real process, with fake sidecars over loopback."""

import asyncio
import signal
from typing import Any

import grpc
import grpc.aio
import pytest

from paramd import places
from paramd.errors import UnreachableError
from paramd.security.tickets import Role
from paramd.v1 import control_pb2_grpc
from tests.integration.control_process import (
    JOB,
    FakeSidecar,
    control_plane,
    joined,
    mesh,
    schedule,
    serving,
    ticket,
    until,
)

pytestmark = pytest.mark.usefixtures("grpc_is_up")


async def test_it_ends_when_all_sidecars_said_farewell() -> None:
    with control_plane() as control:
        zero, one = FakeSidecar(0), FakeSidecar(1)
        async with (
            serving(zero),
            serving(one),
            joined(control, zero) as tell_zero,
            joined(control, one) as tell_one,
        ):
            await tell_one(one.report(leaving=True))
            await tell_zero(zero.report(leaving=True))
            await until(lambda: control.process.poll() is not None)
        assert control.wait() == 0
        assert "all 2 ranks have detached" in control.log.read_text()
        with pytest.raises(UnreachableError):
            places.read_endpoint(JOB)


async def test_a_training_that_resumes_is_told_addresses_at_once_and_who_connects_waits() -> None:
    with control_plane(resumes=True) as control:
        assert "serving" not in control.log.read_text()
        endpoint = places.read_endpoint(JOB)
        assert (endpoint.url, endpoint.grpc_address) == (control.url, control.grpc_address)
        answer = await asyncio.to_thread(control.get, f"/api/v1/jobs/{JOB}")
        assert answer.status_code == 200
        await until(lambda: "serving" in control.log.read_text())
        async with mesh(control):
            pass


def test_what_was_told_before_a_start_that_fails_is_withdrawn() -> None:
    (places.job_dir(JOB) / "generation").mkdir()
    with control_plane(resumes=True) as control:
        assert control.wait() != 0
        assert not (places.state_dir() / JOB / "endpoint.json").exists()


async def test_sigterm_drains_and_sends_sidecars_away() -> None:
    with control_plane() as control:
        zero = FakeSidecar(0)
        async with serving(zero), grpc.aio.insecure_channel(control.grpc_address) as channel:
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            stream = stub.Join(metadata=ticket(Role.SIDECAR))
            await stream.write(zero.report())
            await stream.read()
            control.process.send_signal(signal.SIGTERM)
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: control.process.poll() is not None)
        assert control.wait() == 0
        assert not (places.state_dir() / JOB / "endpoint.json").exists()


async def test_a_second_signal_forces() -> None:
    with control_plane("--drain-s", "600") as control:
        async with mesh(control) as (zero, _):
            zero.gate.clear()
            call = asyncio.create_task(schedule(control, timeout_s=60.0))
            await until(lambda: zero.asked)
            control.process.send_signal(signal.SIGTERM)
            await until(lambda: not (places.state_dir() / JOB / "endpoint.json").exists())
            assert control.process.poll() is None
            control.process.send_signal(signal.SIGTERM)
            await until(lambda: control.process.poll() is not None)
            assert control.wait() == 128 + signal.SIGTERM
            with pytest.raises(grpc.aio.AioRpcError):
                await call
