"""InspectTrainer, GetLogged and statistics of differences, by a real sidecar."""

from __future__ import annotations

import grpc
import pytest

from paramd.memory import handover
from paramd.memory.handover import Message
from paramd.v1 import sidecar_pb2 as pb
from tests.integration.fake_trainer import FakeTrainer
from tests.integration.sidecar_process import Client


def told(trainer: FakeTrainer, message: Message, fds: list[int]) -> Message:
    """What the sidecar answers."""
    handover.send(trainer.connection, message, fds)
    answer, _ = handover.receive(trainer.connection)
    return answer


def inspect(client: Client, **fields: int) -> pb.InspectTrainerResponse:
    found: pb.InspectTrainerResponse = client.call(
        "InspectTrainer", pb.InspectTrainerRequest(**fields), 10.0
    )
    return found


def logged(client: Client, **fields: int) -> pb.GetLoggedResponse:
    found: pb.GetLoggedResponse = client.call("GetLogged", pb.GetLoggedRequest(**fields))
    return found


@pytest.mark.parametrize("message", [{}, {"thread": 1}, {"thread": "x", "signal": 1}])
def test_a_line_that_is_none_is_refused_and_the_trainer_stays(
    trainer: FakeTrainer, client: Client, message: Message
) -> None:
    answer = told(trainer, {"op": "insight", **message}, [])
    assert answer["code"] == "INVALID_ARGUMENT"
    assert "expected thread, signal" in answer["message"]
    assert "no line" in inspect(client).missing


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
