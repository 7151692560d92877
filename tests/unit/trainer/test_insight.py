"""The trainer's side of the line: stacks, collectives, logged numbers."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paramd.errors import UsageError
from paramd.trainer.helpers import insight as module
from paramd.trainer.helpers.insight import Insight, checked_numbers


@contextmanager
def line() -> Iterator[tuple[Insight, socket.socket, dict[str, Any], int]]:
    """An `Insight`, the sidecar's end of its line, the message, and its memory."""
    insight = Insight()
    message, (end, dump) = insight.open_line()
    assert os.fstat(dump).st_mode & 0o777 == 0o600
    theirs = socket.socket(fileno=end)
    theirs.settimeout(20.0)
    try:
        yield insight, theirs, message, dump
    finally:
        theirs.close()
        os.close(dump)
        insight.close()


def received(theirs: socket.socket) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(theirs.recv(1 << 20))
    return found


def test_logged_numbers_arrive_and_survive_a_sidecar_that_was_away() -> None:
    with line() as (insight, theirs, _message, _dump):
        loss = torch.tensor(2.5, requires_grad=True)
        insight.log(3, {"loss": loss, "lr": 1e-3, "bad": float("nan")})
        loss.data.fill_(9.0)
        [[step, time_s, values]] = received(theirs)["entries"]
        assert (step, values) == (3, {"loss": 2.5, "lr": 1e-3, "bad": "nan"})
        assert time_s > 1e9
        theirs.close()
        for at in range(4, 8):
            insight.log(at, {"loss": at})
        _, (end, dump) = insight.open_line()
        os.close(dump)
        with socket.socket(fileno=end) as again:
            again.settimeout(20.0)
            steps: list[int] = []
            while steps[-1:] != [7]:
                steps += [step for step, _, _ in received(again)["entries"]]
    assert steps == [4, 5, 6, 7]


def test_a_question_is_answered_at_once_while_numbers_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Answers that wait for numbers come at one moment of each step, and show the same place.
    monkeypatch.setattr(module, "_BATCH_PAUSE_S", 600.0)
    with line() as (insight, theirs, _message, _dump):
        for number in range(2):
            insight.log(number, {"loss": 1.0})
            theirs.send(json.dumps({"op": "stacks", "id": number}).encode())
            found = received(theirs)
            while found["op"] != "stacks":
                found = received(theirs)
            assert found["id"] == number


def test_a_sidecar_that_takes_nothing_costs_the_oldest_numbers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_AGAIN_MS", 10)
    with line() as (insight, _theirs, _message, _dump):
        for at in range(4 * module.MAX_PENDING):
            insight.log(at, {"loss": at})
        assert len(insight._pending) <= module.MAX_PENDING


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({}, "0 numbers"),
        ({f"n{i}": i for i in range(65)}, "65 numbers"),
        ({"1st": 1.0}, "cannot name a number"),
        ({"a b": 1.0}, "cannot name a number"),
        ({"x" * 61: 1.0}, "cannot name a number"),
        ({"loss": "high"}, "of type str"),
        ({"loss": None}, "of type NoneType"),
        ({"loss": torch.zeros(2)}, "expected one real number"),
        ({"loss": torch.zeros(1, dtype=torch.complex64)}, "expected one real number"),
    ],
)
def test_what_is_no_number_is_refused_whole(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked_numbers(numbers)
