"""The embedded control plane as a real process, with fake sidecars over loopback."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from paramd import places
from paramd.errors import UnreachableError
from paramd.security.tickets import Role
from paramd.v1 import control_pb2_grpc
from tests.integration.control_process import (
    DIGEST,
    JOB,
    Control,
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


async def test_an_agreed_boundary_is_captured_on_all_ranks_at_one_step() -> None:
    with control_plane() as control:
        async with mesh(control) as (zero, one):
            answer = await schedule(control, (0, "a"), (1, "b"), (1, "c"))
            assert (answer.captured, answer.reason) == (True, "")
            assert (answer.header.step, answer.header.incarnation, answer.header.rank) == (
                11,
                1,
                -1,
            )
            assert zero.asked == [(1, ("a",))]
            assert one.asked == [(1, ("b", "c"))]
            document = control.job()
            assert [peer["rank"] for peer in document["peers"]] == [0, 1]
            assert document["peers"][1]["address"] == one.address
            assert (document["layout_digest"], document["reason"]) == (DIGEST, "")
            one.step = 20
            answer = await schedule(control, (0, "d"))
            assert not answer.captured
            assert "different steps: rank 0 at 12, rank 1 at 22" in answer.reason
            one.captured, one.reason = False, "an update began before the copy ended"
            answer = await schedule(control, (0, "e"))
            assert answer.header.step == -1
            assert answer.reason == "rank 1: an update began before the copy ended"
            text = control.get("/metrics").text
            assert 'paramd_boundary_rounds_total{captured="true",job="run"} 1.0' in text
            assert 'paramd_boundary_rounds_total{captured="false",job="run"} 2.0' in text
            assert 'paramd_rank_step{job="run",rank="1"} 10.0' in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"timeout_s": None}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"timeout_s": 3600.0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"snapshots": [(2, "a")]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"snapshots": [(-1, "a")]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"snapshots": [(0, "")]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"incarnation": 2}, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_a_malformed_request_is_refused(
    shared: Control, arguments: dict[str, Any], code: grpc.StatusCode
) -> None:
    snapshots = arguments.pop("snapshots", [])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await schedule(shared, *snapshots, **arguments)
    assert caught.value.code() is code


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    """One control plane for tests that only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAMD_STATE_DIR", str(tmp_path_factory.mktemp("shared")))
        # Tests of other modules may run in between: no sidecar joins it for longer than usual.
        with control_plane("--empty-end-s", "3600") as control:
            yield control


async def test_a_restarted_control_plane_goes_on_above_what_ranks_were_ready_for() -> None:
    with control_plane() as first:
        async with mesh(first) as before:
            await schedule(first)
            await schedule(first)
        first.process.kill()
        first.wait()
        http, rpc = first.url.removeprefix("http://"), first.grpc_address
        with control_plane("--grpc-listen", rpc, listen=http) as second:
            assert (second.url, second.grpc_address) == (first.url, first.grpc_address)
            assert places.read_endpoint(JOB).pid == second.process.pid
            again = [FakeSidecar(s.rank, ready_boundary=s.ready_boundary) for s in before]
            async with (
                serving(again[0]),
                serving(again[1]),
                joined(second, again[0]),
                joined(second, again[1]),
            ):
                assert (await schedule(second)).captured
                assert [number for number, _ in again[0].asked] == [3]


def test_bytes_that_are_no_http_are_refused_and_it_goes_on(shared: Control) -> None:
    host, port = shared.url.removeprefix("http://").split(":")
    for sent in (b"\x00" * 512, b"GET " + b"a" * 100_000, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10.0) as connection:
            connection.sendall(sent)
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert shared.get("/readyz", None).status_code == 200


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
