"""State as bytes without pickle: what comes back, and what is refused by its path."""

import math
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from paramd.errors import UsageError
from paramd.trainer.resume.codec import decode, encode, random_state, set_random_state

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
