"""What a sidecar refuses: strangers, calls without deadline, malformed requests, late comers."""

import mmap
import os
import signal
import threading
from pathlib import Path

import grpc
import pytest

from paramd.memory import handover
from paramd.memory.control_page import Word
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import FakeTrainer, expect
from tests.integration.sidecar_process import Client, SidecarProcess, ticket, values_of, wait_until


def test_a_plan_for_another_incarnation_or_layout_is_stale(client: Client) -> None:
    for incarnation, digest in ((2, client.digest), (1, "other")):
        request = client.pin_request()
        request.incarnation, request.layout_digest = incarnation, digest
        with pytest.raises(grpc.RpcError, match="fetch the layout again") as refused:
            client.call("PinSnapshot", request)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_client_of_the_same_host_maps_a_snapshot(trainer: FakeTrainer, client: Client) -> None:
    trainer.update()
    pin = client.pin()
    connection = handover.connect(_socket_path(client, trainer))
    try:
        request = {"op": "map", "ticket": "wrong", "snapshot_id": pin.snapshot_id}
        handover.send(connection, request)
        assert expect(connection, "error")[0]["code"] == "PERMISSION_DENIED"
        handover.send(connection, {**request, "ticket": ticket()})
        message, (descriptor,) = expect(connection, "mapped")
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, message["size_bytes"], prot=mmap.PROT_WRITE)
        with mmap.mmap(descriptor, message["size_bytes"], prot=mmap.PROT_READ) as memory:
            os.close(descriptor)
            # Released while it is mapped: its memory must never be used for another step.
            client.release(pin.snapshot_id)
            trainer.update()
            assert values_of(client.read(client.pin().snapshot_id)) == {2}
            assert values_of(bytes(memory)) == {1}
    finally:
        connection.close()


def _socket_path(client: Client, trainer: FakeTrainer) -> Path:
    return Path(trainer.connection.getpeername())


def test_nonsense_on_the_unix_socket_is_answered(process: SidecarProcess) -> None:
    connection = handover.connect(process.socket_path)
    try:
        for data in (
            b"nonsense",
            b"[]",
            b'{"op": "fly"}',
            b'{"op": "detach"}',
            b'{"op": "attach"}',
        ):
            connection.send(data)
            assert expect(connection, "error")[0]["code"] in (
                "INVALID_ARGUMENT",
                "FAILED_PRECONDITION",
            )
    finally:
        connection.close()


def test_a_running_call_may_end_while_the_sidecar_drains(
    process: SidecarProcess, trainer: FakeTrainer, client: Client
) -> None:
    trainer.begin_update()
    found: list[pb.PinSnapshotResponse] = []
    pinning = threading.Thread(target=lambda: found.append(client.pin()))
    pinning.start()
    wait_until(lambda: trainer.page[Word.WANT] == 1, "the pin waits")
    process.process.send_signal(signal.SIGTERM)
    wait_until(lambda: '"step": 3' in process.log, "the sidecar drains")
    trainer.end_update()
    trainer.boundary()
    pinning.join()
    assert found[0].header.step == 1
    assert process.process.wait(timeout=60) == 0


def test_a_second_signal_forces(process: SidecarProcess, trainer: FakeTrainer) -> None:
    trainer.begin_update()
    client = Client(trainer.address)
    try:
        call = client.stub.PinSnapshot.future(
            client.pin_request(), timeout=20, metadata=client.metadata
        )
        wait_until(lambda: trainer.page[Word.WANT] == 1, "the pin waits")
        process.process.send_signal(signal.SIGTERM)
        wait_until(lambda: '"step": 3' in process.log, "the sidecar drains")
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(timeout=60) == 128 + signal.SIGTERM
        assert call.exception(timeout=20) is not None
    finally:
        client.close()
        trainer.end_update()
