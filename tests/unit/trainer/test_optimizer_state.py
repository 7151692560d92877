"""What the sidecar reads of a trainer's record and table, without torch."""

import struct
from typing import Any

import pytest

from paramd.errors import UsageError
from paramd.memory.optimizer_state import OptimizerState, parse_state, read_record
from paramd.trainer.resume.codec import encode


def table(*params: list[Any], entries: list[Any]) -> OptimizerState:
    kept = {
        "optimizers": [],
        "entries": entries,
        "params": [list(params)],
        "classes": ["torch.optim.adam.Adam"],
    }
    return parse_state(encode(kept))


def test_state_is_found_by_the_bytes_of_its_parameter() -> None:
    first = [64, 0, "float32", [4, 3], [3, 1]]
    second = [112, 1, "bfloat16", [5], [1]]
    state = table(
        first,
        second,
        entries=[
            [0, 0, "step", [0, 4, "float32", [], [], False]],
            [0, 0, "exp_avg", [1000, 48, "float32", [4, 3], [3, 1], True]],
            [0, 0, "factor", [2000, 16, "float32", [4], [1], False]],
            [0, 1, "exp_avg", [3000, 20, "float32", [5], [1], False]],
            [0, 1, "count", None],
        ],
    )
    assert state.keys == ["exp_avg"]
    # From the middle of the first to beyond its end; the second has no state of its own dtype.
    assert state.pieces("exp_avg", 76, 120) == [(76, 1012, 36)]
    assert state.pieces("exp_avg", 0, 64) == []
    assert "shape" in state.params[0].left_out["factor"]
    assert "float32" in state.params[1].left_out["exp_avg"]
    assert state.params[1].left_out["count"] == "it is no tensor"
    facts = state.facts(recorded(), nine, 4096)
    assert facts["params"][0]["scalars"] == {"step": 9.0}


def nine(place: int, size_bytes: int) -> bytes:
    """What is read at place 0."""
    return struct.pack("=f", 9.0)[place : place + size_bytes]


def test_parameters_that_interleave_have_no_state_of_their_own() -> None:
    columns = [[0, 0, "float32", [3, 2], [5, 1]], [8, 0, "float32", [3, 3], [5, 1]]]
    entries = [
        [0, 0, "exp_avg", [0, 48, "float32", [3, 2], [5, 1], False]],
        [0, 1, "exp_avg", [64, 52, "float32", [3, 3], [5, 1], False]],
    ]
    state = table(*columns, entries=entries)
    assert state.pieces("exp_avg", 0, 60) == []
    assert state.params[0].left_out == {"exp_avg": "parameters share its bytes"}


def recorded(*others: Any) -> dict[str, Any]:
    return read_record(encode({"step": 9, "groups": [[{"lr": 0.5}]], "others": list(others)}))


@pytest.mark.parametrize(
    ("described", "why"),
    [
        ([0, 16, "float32", [4], [1], False], "local shape"),
        ([0, 24, "bfloat16", [4, 3], [3, 1], False], "another size"),
        ([0, 48, "float32", [4, 3], [1, 4], False], "other strides"),
        ([0, 48, "int32", [4, 3], [3, 1], False], "it is int32, its parameter float32"),
    ],
)
def test_state_that_does_not_correspond_is_left_out_with_the_reason(
    described: Any, why: str
) -> None:
    state = table([0, 0, "float32", [4, 3], [3, 1]], entries=[[0, 0, "odd", described]])
    assert why in state.params[0].left_out["odd"]
    assert state.keys == []


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, encode([1]), encode({"step": "x"})])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        read_record(data)
    with pytest.raises(UsageError):
        parse_state(data)
