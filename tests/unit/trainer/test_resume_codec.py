"""State as bytes without pickle: what comes back, and what is refused by its path."""

import json
import math
import random
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from paramd.errors import UsageError
from paramd.trainer.resume.codec import decode, encode, random_state, set_random_state
from paramd.trainer.resume.succession import _checked

PLAIN = [
    None, True, 1 << 80, -0.0, 0.1 + 0.2, "\u00c4\n", b"\x00\xff", [], (1, [2, (3,)]),
    {"a": 1, 2: "b", None: [True], 1.5: ()}, OrderedDict([("z", 1), ("a", 2)]),
    Counter({30: 2, 60: 1}), {"dict": {"tensor": 1}},
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = decode(encode(value))
    assert (type(found), found, repr(found)) == (type(value), value, repr(value))


def test_numbers_that_json_lacks_come_back() -> None:
    nan, inf = decode(encode([math.nan, -math.inf]))
    assert math.isnan(nan)
    assert inf == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.randn(shape) * 3).to(dtype)
    found = decode(encode({"odd": b"x", "value": value.t() if len(shape) == 2 else value}))
    expected = value.t() if len(shape) == 2 else value
    assert found["value"].dtype == dtype
    assert torch.equal(found["value"], expected)


def test_numpy_values_come_back() -> None:
    array, number = decode(encode([np.arange(6, dtype=np.uint32).reshape(2, 3), np.float64(0.1)]))
    assert array.dtype == np.uint32
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(number) is np.float64
    assert number == 0.1


def test_what_has_no_form_is_named_by_its_path() -> None:
    with pytest.raises(UsageError, match=r"keep\['s'\]\['a'\]\[1\] is a builtins.function"):
        encode({"a": [1, lambda: None]}, name="keep['s']")
    with pytest.raises(UsageError, match="the key"):
        encode({(1, 2): 3}, name="keep")
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="nested"):
        encode(endless)


@pytest.mark.parametrize("cut", [0, 4, 12, 30])
def test_bytes_that_were_cut_are_refused(cut: int) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        decode(encode({"tensor": torch.ones(9)})[:cut])


def test_generators_go_on_where_they_were() -> None:
    kept = encode(random_state())

    def drawn() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    expected = drawn()
    drawn()
    set_random_state(decode(kept))
    assert drawn() == expected


@pytest.mark.parametrize(
    "document",
    [
        {"tensor": ["float32", [1 << 61], 0, 0]},
        {"tensor": ["float32", [-1], 0, 0]},
        {"tensor": ["float32", [2], 0, 3]},
        {"tensor": ["float32", ["x"], 0, 4]},
        {"tensor": ["nn", [1], 0, 4]},
        {"tensor": ["no_such_dtype", [1], 0, 4]},
        {"tensor": [7, [1], 0, 4]},
        {"tensor": ["float32", [1], -4, 4]},
        {"numpy": ["O", [1], 0, 8]},
        {"numpy": ["<f4", [1 << 61], 0, 4]},
        {"numpy": ["|V0", [1], 0, 0]},
        {"numpy": ["x", None, 0, 0]},
        {"dict": [[[], 1]]},
        {"dict": [1]},
        {"counter": [["a"]]},
        {"bytes": ["0", "1"]},
        {"bytes": [1 << 80, 1]},
        {"tuple": 1},
        {"unknown": 1},
        {},
        {"a": 1, "b": 2},
    ],
)
def test_what_no_program_of_ours_wrote_is_refused_and_no_traceback(document: Any) -> None:
    text = json.dumps(document).encode()
    with pytest.raises(UsageError, match="cannot be read"):
        decode(struct.pack("=Q", len(text)) + text + bytes(8))


@pytest.mark.parametrize("text", [b"\xff", b"[" * 100_000, b"NaN,", b"1" * 10_000])
def test_text_that_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        decode(struct.pack("=Q", len(text)) + text)


RECORD = {
    "step": 3, "groups": [[{"lr": 0.1}]], "others": [], "random_forward": None,
    "late": encode({}), "early": encode({"keep": {}, "random": random_state()}),
}  # fmt: skip
TABLE = {"on_device": False, "used_bytes": [8], "optimizers": [["AdamW", [[["float32", [2]]]]]]}


def test_a_record_and_table_that_go_together_are_taken() -> None:
    assert _checked(dict(RECORD), dict(TABLE)) == TABLE


@pytest.mark.parametrize(
    ("record", "table"),
    [
        ({"early": b""}, {}),
        ({"early": encode({"keep": {}})}, {}),
        ({"early": encode({"keep": 1, "random": random_state()})}, {}),
        ({"early": encode({"keep": {}, "random": {"python": [3, b"", None], "torch": 1}})}, {}),
        ({"late": encode([1])}, {}),
        ({"late": 7}, {}),
        ({"groups": [[1]]}, {}),
        ({"groups": None}, {}),
        ({}, {"used_bytes": ["x"]}),
        ({}, {"used_bytes": []}),
        ({}, {"used_bytes": [-8]}),
        ({}, {"optimizers": [["AdamW"]]}),
        ({}, {"optimizers": [["AdamW", [[1]]]]}),
    ],
)
def test_a_record_that_would_fail_later_is_refused_where_another_can_be_chosen(
    record: dict[str, Any], table: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        _checked(RECORD | record, TABLE | table)
