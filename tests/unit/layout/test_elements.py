"""Elements as text give exactly the element again; torch says which it is."""

import math

import pytest
import torch

from paramd.layout.dtypes import ITEM_BYTES
from paramd.layout.heatmaps import element_texts

EIGHT_BITS = [name for name in ITEM_BYTES if name.startswith("float8")]


def same(text: str, value: float) -> bool:
    return float(text) == value or (math.isnan(float(text)) and math.isnan(value))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_float8_is_what_torch_says(dtype: str) -> None:
    every = bytearray(range(256))
    values = torch.frombuffer(every, dtype=torch.uint8).view(getattr(torch, dtype)).double()
    texts = element_texts(every, dtype)
    assert all(same(t, v) for t, v in zip(texts, values.tolist(), strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_float_is_what_torch_says(dtype: str) -> None:
    every = torch.arange(1 << 16).to(torch.int32).to(torch.uint16)
    values = every.view(getattr(torch, dtype)).double().tolist()
    texts = element_texts(bytearray(every.view(torch.uint8).tolist()), dtype)
    assert all(same(t, v) for t, v in zip(texts, values, strict=True))
    assert math.copysign(1, float(texts[1 << 15])) == -1


def test_booleans_and_complex_numbers_read_as_such() -> None:
    assert element_texts(b"\x00\x01", "bool") == ["false", "true"]
    values = torch.tensor([1 - 2j, complex(-0.0, math.inf), complex(math.nan, 0.5)])
    texts = element_texts(bytearray(values.view(torch.float32).view(torch.uint8).tolist()),
                          "complex64")  # fmt: skip
    assert texts == ["1.0-2.0j", "-0.0+infj", "nan+0.5j"]
    assert complex(texts[0]) == 1 - 2j
