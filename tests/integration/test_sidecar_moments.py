"""Optimizer state at a real sidecar: read where it lies, or copied there at a boundary."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramd.memory.continuation import RECORD, TABLE, KeptSlots
from paramd.memory.control_page import Word
from paramd.memory.descriptors import SparseMemory
from paramd.memory.optimizer_state import parse_table
from paramd.security.tickets import Role
from paramd.trainer.resume.codec import encode
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import Client, client_of, sidecar, wait_until

ARENA_BYTES = 1 << 16
KEYS = ["exp_avg", "exp_avg_sq"]
OPTIMIZER, CONTINUATION = 5, 6
"""Where these memories come in the order of the handover."""

Record = Callable[..., None]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[FakeTrainer]:
    with sidecar(tmp_path / "s") as process:
        settings = TrainerSettings(arena_bytes=ARENA_BYTES, update_s=0.0, constant_s=0.005)
        with closing(attach(process.socket_path, settings)) as found:
            yield found


@pytest.fixture
def record(trainer: FakeTrainer) -> Iterator[Record]:
    """Writes what the trainer would: all state, and the record and table of it."""
    memory, kept = (SparseMemory(trainer.fds[at]) for at in (OPTIMIZER, CONTINUATION))
    records, tables = KeptSlots(kept, RECORD), KeptSlots(kept, TABLE)
    shape = [[ARENA_BYTES // 8], [1]]

    def write(failure: str = "") -> None:
        memory.reserve(0, len(KEYS) * ARENA_BYTES)
        for number in range(len(KEYS)):
            begin = number * ARENA_BYTES
            memory.buffer[begin : begin + ARENA_BYTES] = state(number)
        entries = [
            [0, 0, key, [i * ARENA_BYTES, ARENA_BYTES, "int64", *shape, False]]
            for i, key in enumerate(KEYS)
        ]
        table = {"params": [[[0, 0, "int64", *shape]]], "classes": ["X"], "failure": failure}
        number = tables.write(encode(table | {"entries": entries if not failure else []}))
        records.write(encode({"step": 0, "groups": [[{"lr": 0.5}]]}), beside=number)
        trainer.page[Word.RECORD_STEP] = trainer.page[Word.STEP]

    yield write
    memory.close()
    kept.close()


@pytest.fixture
def client(trainer: FakeTrainer) -> Iterator[Client]:
    trainer.send_mesh()
    with client_of(trainer, Role.CONTROL) as found:
        yield found


def state(number: int) -> bytes:
    """Byte x of the state of one key is (x + its number) modulo 251."""
    return bytes((at + number) % 251 for at in range(ARENA_BYTES))


def pinned(client: Client, key: str, *spans: tuple[int, int], **fields: Any) -> Any:
    """A pin of state, or without a key of the table."""
    request = client.pin_request(*spans, source=pb.SOURCE_MOMENTS, state_key=key, **fields)
    if not spans:
        request.ClearField("spans")
    return client.call("PinSnapshot", request)


def refused(client: Client, code: grpc.StatusCode, key: str, **fields: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        pinned(client, key, (0, 64), **fields)
    assert caught.value.code() is code  # type: ignore[attr-defined]
    return str(caught.value.details())  # type: ignore[attr-defined]


def test_state_that_the_trainer_copies_comes_with_the_parameters_of_its_step(
    trainer: FakeTrainer, record: Record, client: Client
) -> None:
    trainer.copy_state = record
    trainer.start()
    spans = ((64, 8_000), (8_192, ARENA_BYTES))
    ids = [pinned(client, key, *spans, at_boundary=True).snapshot_id for key in KEYS]
    table = pinned(client, "", at_boundary=True).snapshot_id
    params = client.pin(at_boundary=True).snapshot_id
    request = pb.ReachBoundaryRequest(
        incarnation=client.incarnation, boundary=1, token=1, snapshot_ids=[params, table, *ids]
    )
    answer = client.call("ReachBoundary", request)
    assert answer.captured, answer.reason
    told = parse_table(client.read(table))
    assert (told["step"], told["keys"], told["failure"]) == (answer.header.step, KEYS, "")
    for number, snapshot_id in enumerate(ids):
        expected = b"".join(state(number)[begin:end] for begin, end in spans)
        assert client.read(snapshot_id) == expected
    descriptor = trainer.fds[OPTIMIZER]
    wait_until(lambda: os.fstat(descriptor).st_blocks == 0, "the copies' memory is given back")
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    assert "agreed boundaries alone" in refused(client, precondition, "exp_avg")


def test_state_that_lies_there_is_read_without_the_trainer(
    trainer: FakeTrainer, record: Record, client: Client
) -> None:
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    trainer.page[Word.MOMENTS_LIVE] = 1
    assert "not been recorded" in refused(client, precondition, "exp_avg")
    trainer.page[Word.SEQ] &= ~1
    record()
    found = pinned(client, "exp_avg_sq", (128, 4_096))
    assert client.read(found.snapshot_id) == state(1)[128:4_096]
    facts = json.loads(zlib.decompress(found.optimizer))
    assert (facts["keys"], facts["groups"]) == (KEYS, [[{"lr": 0.5}]])
    assert parse_table(client.read(pinned(client, "").snapshot_id)) == facts
    assert "exp_avg" in refused(client, grpc.StatusCode.NOT_FOUND, "momentum")
    record(failure="state 'x' is sparse")
    assert "'x' is sparse" in refused(client, precondition, "exp_avg")


def test_requests_that_do_not_go_together_are_refused(client: Client) -> None:
    wrong: list[dict[str, Any]] = [{"at_step": 3}, {"at_boundary": True}]
    for fields in wrong:
        with pytest.raises(grpc.RpcError, match="optimizer state"):
            client.pin((0, 64), source=pb.SOURCE_MOMENTS, **fields)
