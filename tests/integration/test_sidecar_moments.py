"""Optimizer state at a real sidecar: mirrored once, pinned by key, given back."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramd.memory.descriptors import SparseMemory, pages
from paramd.memory.moments_table import parse_table, room_begin, table_begin
from paramd.security.tickets import Role
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import Client, client_of, sidecar, wait_until

ARENA_BYTES = 1 << 16
KEYS = ["exp_avg", "exp_avg_sq"]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[FakeTrainer]:
    with sidecar(tmp_path / "s") as process:
        settings = TrainerSettings(arena_bytes=ARENA_BYTES, update_s=0.0, constant_s=0.005)
        found = attach(process.socket_path, settings)
        with closing(found), closing(SparseMemory(found.fds[5])) as memory:
            found.mirror = lambda: mirror(memory)
            found.send_mesh()
            found.start()
            yield found


@pytest.fixture
def client(trainer: FakeTrainer) -> Iterator[Client]:
    with client_of(trainer, Role.CONTROL) as found:
        yield found


def mirror(memory: SparseMemory) -> None:
    """Byte x of room i is (x + i) modulo 251."""
    memory.reserve(0, len(KEYS) * pages(ARENA_BYTES))
    for number in range(len(KEYS)):
        begin = room_begin(number, ARENA_BYTES)
        memory.buffer[begin : begin + ARENA_BYTES] = room(number)
    data = zlib.compress(json.dumps({"keys": KEYS}).encode())
    begin = table_begin(ARENA_BYTES)
    memory.reserve(begin, begin + pages(8 + len(data)))
    memory.buffer[begin : begin + 8] = len(data).to_bytes(8, "little")
    memory.buffer[begin + 8 : begin + 8 + len(data)] = data


def room(number: int) -> bytes:
    return bytes((at + number) % 251 for at in range(ARENA_BYTES))


def pinned_table(client: Client) -> Any:
    request = client.pin_request(source=pb.SOURCE_MOMENTS, at_boundary=True)
    request.ClearField("spans")
    return client.call("PinSnapshot", request)


def captured(client: Client, number: int, *snapshot_ids: str) -> Any:
    request = pb.ReachBoundaryRequest(
        incarnation=client.incarnation, boundary=number, token=number, snapshot_ids=snapshot_ids
    )
    answer = client.call("ReachBoundary", request)
    assert answer.captured, answer.reason
    return answer


def pin_key(client: Client, key: str, step: int, *spans: tuple[int, int]) -> Any:
    return client.pin(*spans, source=pb.SOURCE_MOMENTS, state_key=key, at_step=step)


def refused(client: Client, code: grpc.StatusCode, key: str, step: int, begin: int = 0) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        pin_key(client, key, step, (begin, begin + 64))
    assert caught.value.code() is code  # type: ignore[attr-defined]
    return str(caught.value.details())  # type: ignore[attr-defined]


def used_bytes(trainer: FakeTrainer) -> int:
    return os.fstat(trainer.fds[5]).st_blocks * 512


def test_state_is_pinned_by_key_at_the_step_of_the_parameters(
    trainer: FakeTrainer, client: Client
) -> None:
    table, params = pinned_table(client), client.pin(at_boundary=True)
    step = captured(client, 1, table.snapshot_id, params.snapshot_id).header.step
    assert parse_table(client.read(table.snapshot_id))["keys"] == KEYS
    spans = ((64, 8_000), (8_192, ARENA_BYTES))
    for number, key in enumerate(KEYS):
        found = pin_key(client, key, step, *spans)
        assert found.header.step == step
        expected = b"".join(room(number)[begin:end] for begin, end in spans)
        assert client.read(found.snapshot_id) == expected
    aborted, not_found = grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND
    assert "exp_avg" in refused(client, not_found, "momentum", step)
    assert "passed" in refused(client, aborted, "exp_avg", step + 1)
    assert "already" in refused(client, grpc.StatusCode.FAILED_PRECONDITION, "exp_avg", step, 96)
    client.release(table.snapshot_id)
    assert "passed" in refused(client, aborted, "exp_avg", step)
    wait_until(lambda: used_bytes(trainer) == 0, "the mirror's memory is given back")


def test_a_second_mirror_waits_for_the_first_reader(trainer: FakeTrainer, client: Client) -> None:
    first, second = pinned_table(client), pinned_table(client)
    captured(client, 1, first.snapshot_id)
    with pytest.raises(grpc.RpcError, match="another reader"):
        captured(client, 2, second.snapshot_id)
    client.release(first.snapshot_id)
    step = captured(client, 3, second.snapshot_id).header.step
    assert client.read(pin_key(client, "exp_avg", step, (0, 64)).snapshot_id) == room(0)[:64]


def test_requests_that_do_not_go_together_are_refused(client: Client) -> None:
    wrong: list[dict[str, Any]] = [
        {"state_key": "exp_avg", "at_boundary": True},
        {"state_key": "exp_avg"},
        {"at_step": 3},
        {"at_boundary": True},
    ]
    for fields in wrong:
        with pytest.raises(grpc.RpcError, match="optimizer state"):
            client.pin((0, 64), source=pb.SOURCE_MOMENTS, **fields)
