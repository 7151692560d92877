"""Pins against a real sidecar: one step always, shared, leased, bounded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from paramd.memory.control_page import STRAYS_KEPT, Word, note_stray
from paramd.security.tickets import Role
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import (
    Client,
    SidecarProcess,
    client_of,
    sidecar,
    values_of,
    wait_until,
)

ARENA_BYTES = 1 << 20


@pytest.fixture
def trainer(process: SidecarProcess) -> Iterator[FakeTrainer]:
    attached = attach(process.socket_path, TrainerSettings(arena_bytes=ARENA_BYTES))
    try:
        attached.send_mesh()
        yield attached
    finally:
        attached.close()


def capture(
    client: Client, number: int, *snapshot_ids: str, timeout_s: float = 5.0
) -> pb.ReachBoundaryResponse:
    request = pb.ReachBoundaryRequest(
        incarnation=client.incarnation, boundary=number, token=number, snapshot_ids=snapshot_ids
    )
    answer = client.call("ReachBoundary", request, timeout_s)
    assert isinstance(answer, pb.ReachBoundaryResponse)
    return answer


def test_equal_pins_of_a_held_rank_share_one_copy(trainer: FakeTrainer, client: Client) -> None:
    trainer.update()
    first, second = client.pin(), client.pin()
    client.release(first.snapshot_id)
    third = client.pin()
    assert trainer.page[Word.COPY_BEGUN] == 1
    assert {first.header.step, second.header.step, third.header.step} == {1}
    assert values_of(client.read(second.snapshot_id)) == {1}
    for pin in (second, third):
        client.release(pin.snapshot_id)
    fourth = client.pin()
    assert trainer.page[Word.COPY_BEGUN] == 1
    trainer.update()
    assert client.pin().header.step == 2
    assert values_of(client.read(fourth.snapshot_id)) == {1}


def test_a_stray_state_is_void_however_many_stray_later(
    trainer: FakeTrainer, client: Client
) -> None:
    """Two in a row, of which only the last would be told, and then more than are kept."""
    words = trainer.page.words
    trainer.update()
    good = client.pin()
    trainer.update()
    assert values_of(client.read(good.snapshot_id)) == {1}, "found true once its state was over"
    stray = client.pin()
    note_stray(words, words[Word.SEQ])
    trainer.update()
    note_stray(words, words[Word.SEQ])
    trainer.update()
    unseen = client.pin()
    for _ in range(STRAYS_KEPT + 1):
        with pytest.raises(grpc.RpcError) as refused:
            client.read(stray.snapshot_id)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        trainer.update()
        note_stray(words, words[Word.SEQ])
    with pytest.raises(grpc.RpcError) as refused:
        client.read(unseen.snapshot_id)
    assert refused.value.code() is grpc.StatusCode.ABORTED, "it is too long ago to tell"
    assert values_of(client.read(good.snapshot_id)) == {1}


def test_a_boundary_whose_state_strays_is_void(trainer: FakeTrainer) -> None:
    with client_of(trainer, Role.CONTROL) as client:
        prepared = client.pin(at_boundary=True)
        trainer.start()
        answer = capture(client, 1, prepared.snapshot_id)
        trainer.finish()
        assert answer.captured, answer.reason
        seqs = range(0, trainer.page[Word.SEQ] + 2, 2)
        for seq in seqs[-STRAYS_KEPT:]:
            note_stray(trainer.page.words, seq)
        with pytest.raises(grpc.RpcError) as refused:
            client.read(prepared.snapshot_id)
        assert refused.value.code() is grpc.StatusCode.ABORTED


def test_a_pin_inside_an_update_gets_the_next_boundary(
    trainer: FakeTrainer, client: Client
) -> None:
    trainer.begin_update()
    with ThreadPoolExecutor(1) as pool:
        pinning = pool.submit(client.pin)
        wait_until(lambda: trainer.page[Word.WANT] == 1, "the sidecar asks for a boundary")
        for piece in range(8):
            trainer.stamp(1, piece)
        trainer.end_update()
        trainer.boundary()
        pin = pinning.result(timeout=5)
    assert pin.header.step == 1
    assert values_of(client.read(pin.snapshot_id)) == {1}
    wait_until(
        lambda: trainer.page[Word.SERVED] == trainer.page[Word.ANNOUNCE], "the announce is served"
    )


def test_a_pin_that_never_finds_a_boundary_is_aborted_with_the_reason(
    trainer: FakeTrainer, client: Client
) -> None:
    trainer.begin_update()
    begin_s = time.monotonic()
    with pytest.raises(grpc.RpcError) as refused:
        client.pin(timeout_s=1.0)
    trainer.end_update()
    assert refused.value.code() is grpc.StatusCode.ABORTED
    assert "is inside an update" in refused.value.details()
    assert time.monotonic() - begin_s < 1.5


def test_a_boundary_fills_what_was_prepared(trainer: FakeTrainer) -> None:
    with client_of(trainer, Role.CONTROL) as client:
        prepared = client.pin(at_boundary=True)
        assert prepared.header.step == -1
        with pytest.raises(grpc.RpcError, match="schedule a boundary first"):
            client.read(prepared.snapshot_id)
        trainer.start()
        answer = capture(client, 1, prepared.snapshot_id)
        trainer.finish()
        assert answer.captured, answer.reason
        assert answer.header.step == trainer.page[Word.AGREED_STEP]
        assert values_of(client.read(prepared.snapshot_id)) == {answer.header.step}
        assert capture(client, 1, prepared.snapshot_id) == answer


def test_a_request_that_is_not_agreed_is_withdrawn(trainer: FakeTrainer) -> None:
    trainer.settings.agrees = False
    trainer.start()
    with client_of(trainer, Role.CONTROL) as client:
        prepared = client.pin(at_boundary=True)
        answer = capture(client, 7, prepared.snapshot_id, timeout_s=1.0)
        assert not answer.captured
        assert "did not agree on boundary 7" in answer.reason
        assert trainer.page[Word.READY] == trainer.page[Word.AGREED] == 0
        trainer.settings.agrees = True
        assert capture(client, 8, prepared.snapshot_id).captured
    trainer.finish()


def test_a_lease_ends_by_itself_unless_it_is_renewed(trainer: FakeTrainer, client: Client) -> None:
    short, renewed = client.pin(lease_ms=200), client.pin(lease_ms=200)
    granted = client.call(
        "RenewSnapshot", pb.RenewSnapshotRequest(snapshot_id=renewed.snapshot_id, lease_ms=10**9)
    )
    assert granted.lease_ms == 300_000
    wait_until(lambda: client.state().state.snapshot_count == 1, "the short lease ends")
    with pytest.raises(grpc.RpcError) as refused:
        client.read(short.snapshot_id)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(client.read(renewed.snapshot_id)) == ARENA_BYTES
    client.release(renewed.snapshot_id)
    client.release(renewed.snapshot_id)
    assert client.state().state.snapshot_bytes == 0


def test_a_read_resumes_at_any_offset(trainer: FakeTrainer, client: Client) -> None:
    trainer.update()
    pin = client.pin((16, 64), (1024, ARENA_BYTES))
    whole = client.read(pin.snapshot_id)
    assert len(whole) == pin.size_bytes == 48 + ARENA_BYTES - 1024
    assert client.read(pin.snapshot_id, 1001) == whole[1001:]
    assert client.read(pin.snapshot_id, 40, 16) == whole[40:56]
    assert client.read(pin.snapshot_id, pin.size_bytes) == b""


def test_the_budget_refuses_before_it_allocates(tmp_path: Path) -> None:
    with sidecar(tmp_path / "b", "--budget-bytes", str(ARENA_BYTES + 4096)) as process:
        trainer = attach(process.socket_path, TrainerSettings(arena_bytes=ARENA_BYTES))
        try:
            trainer.send_mesh()
            with client_of(trainer) as client:
                pin = client.pin()
                with pytest.raises(grpc.RpcError) as refused:
                    client.pin((0, ARENA_BYTES // 2))
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "524,288 bytes does not fit: 4,096 of the" in refused.value.details()
                client.release(pin.snapshot_id)
                assert client.pin((0, ARENA_BYTES // 2)).size_bytes == ARENA_BYTES // 2
        finally:
            trainer.close()
