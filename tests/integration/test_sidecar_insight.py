"""InspectTrainer, GetLogged and statistics of differences, by a real sidecar."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from paramd.memory import handover
from paramd.memory.handover import Message
from paramd.trainer.helpers.insight import Insight
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import FakeTrainer, TrainerSettings, attach
from tests.integration.sidecar_process import Client, sidecar, wait_until


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[FakeTrainer]:
    with sidecar(tmp_path / "s") as process:
        attached = attach(process.socket_path, TrainerSettings())
        attached.send_mesh()
        try:
            yield attached
        finally:
            attached.close()


def told(trainer: FakeTrainer, message: Message, fds: list[int]) -> Message:
    """What the sidecar answers."""
    handover.send(trainer.connection, message, fds)
    answer, _ = handover.receive(trainer.connection)
    return answer


@contextmanager
def line(trainer: FakeTrainer) -> Iterator[Insight]:
    insight = Insight()
    try:
        message, fds = insight.open_line()
        assert told(trainer, message, fds) == {"op": "insight"}
        for descriptor in fds:
            os.close(descriptor)
        yield insight
    finally:
        insight.close()


def inspect(client: Client, **fields: int) -> pb.InspectTrainerResponse:
    found: pb.InspectTrainerResponse = client.call(
        "InspectTrainer", pb.InspectTrainerRequest(**fields), 10.0
    )
    return found


def logged(client: Client, **fields: int) -> pb.GetLoggedResponse:
    found: pb.GetLoggedResponse = client.call("GetLogged", pb.GetLoggedRequest(**fields))
    return found


def test_a_trainer_without_a_line_is_told_without_stacks(
    trainer: FakeTrainer, client: Client
) -> None:
    found = inspect(client, log_line_count=3)
    assert "no line" in found.missing
    assert (found.source, list(found.threads), found.overdue) == ("", [], False)
    assert found.rss_bytes > 0
    assert found.state.trainer_pid == os.getpid()
    assert logged(client).count == 0


@pytest.mark.parametrize("message", [{}, {"thread": 1}, {"thread": "x", "signal": 1}])
def test_a_line_that_is_none_is_refused_and_the_trainer_stays(
    trainer: FakeTrainer, client: Client, message: Message
) -> None:
    answer = told(trainer, {"op": "insight", **message}, [])
    assert answer["code"] == "INVALID_ARGUMENT"
    assert "expected thread, signal" in answer["message"]
    assert "no line" in inspect(client).missing


def test_stacks_and_numbers_come_over_the_line(trainer: FakeTrainer, client: Client) -> None:
    with line(trainer) as insight:
        found = inspect(client, with_collectives=True)
        assert found.source == "trainer"
        training = next(one for one in found.threads if one.training)
        assert any("test_stacks_and_numbers" in frame.function for frame in training.frames)
        # Other tests of this process may have made process groups.
        assert bool(found.collectives_missing) != bool(found.collectives)
        for step in range(5):
            insight.log(step, {"loss": step / 2})
        wait_until(lambda: logged(client).count == 5, "the numbers arrive")
        assert client.state().state.logged_count == 5
        entries = logged(client, after=2, limit=2).entries
        assert [(one.number, one.step, one.values["loss"]) for one in entries] == [
            (3, 2, 1.0),
            (4, 3, 1.5),
        ]
    wait_until(lambda: "no line" in inspect(client).missing, "the closed line is noticed")
    assert logged(client).count == 5


def test_bad_requests_are_refused(trainer: FakeTrainer, client: Client) -> None:
    for call in (
        lambda: inspect(client, log_line_count=101),
        lambda: inspect(client, log_line_count=-1),
        lambda: logged(client, after=-1),
        lambda: logged(client, limit=1001),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_statistics_of_a_difference(trainer: FakeTrainer, client: Client) -> None:
    trainer.update()
    before = client.pin((0, 800))
    trainer.update()
    after, other = client.pin((0, 800)), client.pin((0, 80))
    items = [pb.StatsItem(begin_bytes=0, numel=100, dtype="int64")]

    def stats(before_id: str) -> pb.Stats:
        request = pb.ComputeStatsRequest(
            snapshot_id=after.snapshot_id, items=items, before_snapshot_id=before_id
        )
        found: pb.ComputeStatsResponse = client.call("ComputeStats", request, 60.0)
        return found.stats[0]

    # Step 2 everywhere minus step 1 everywhere.
    assert (stats(before.snapshot_id).mean, stats(before.snapshot_id).sum_squares) == (1.0, 100.0)
    assert stats("").mean == 2.0
    with pytest.raises(grpc.RpcError, match="before_snapshot_id: a snapshot of 80 bytes"):
        stats(other.snapshot_id)
    with pytest.raises(grpc.RpcError) as gone:
        stats("0" * 32)
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
