"""Single elements without torch: copied from a snapshot into a slice, and as exact text."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import product
from math import inf, nan

from paramd.layout.dtypes import DTYPES, item_bytes
from paramd.layout.plan import Landing
from paramd.layout.types import Box, row_major

# (exponent bits, mantissa bits, bias, has infinity, negative zero is NaN)
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}


def place_elements(
    landing: Landing, snapshot: Sequence[int], result: bytearray, shape: Sequence[int], dtype: str
) -> None:
    """Copy a landing's elements into the row-major `result` of `shape`."""
    size = item_bytes(dtype)
    assert isinstance(snapshot, bytes | bytearray)
    if landing.direct and landing.target_begin_bytes is not None:
        at = landing.target_begin_bytes
        result[at : at + landing.size_bytes] = snapshot[landing.begin_bytes : landing.end_bytes]
        return
    assert isinstance(landing.target, Box), "an interval is always direct"
    steps = row_major(shape)
    origin = sum(b * step for b, step in zip(landing.target.begin, steps, strict=True))
    for index in product(*map(range, landing.sizes)):
        source = sum(i * stride for i, stride in zip(index, landing.strides, strict=True))
        target = origin + sum(i * step for i, step in zip(index, steps, strict=True))
        begin = landing.begin_bytes + source * size
        result[target * size : (target + 1) * size] = snapshot[begin : begin + size]


def element_texts(data: bytes | bytearray, dtype: str) -> list[str]:
    """Every element as text that parses back exactly: decimal, "nan", "inf", "1+2j", "true".

    Raises:
        UsageError: the dtype is not supported.
    """
    size = item_bytes(dtype)
    assert len(data) % size == 0
    if dtype == "bool":
        return ["true" if byte else "false" for byte in data]
    if form := DTYPES[dtype].form:
        return list(map(repr, struct.unpack(f"<{len(data) // size}{form}", data)))
    if dtype == "bfloat16":
        words = struct.unpack(f"<{len(data) // 2}H", data)
        wide = struct.pack(f"<{len(words)}I", *(word << 16 for word in words))
        return list(map(repr, struct.unpack(f"<{len(words)}f", wide)))
    if dtype in ("complex64", "complex128"):
        kind = "f" if dtype == "complex64" else "d"
        parts = struct.unpack(f"<{2 * len(data) // size}{kind}", data)
        return [_complex(re, im) for re, im in zip(parts[::2], parts[1::2], strict=True)]
    if dtype == "float8_e8m0fnu":
        return [repr(nan if byte == 255 else 2.0 ** (byte - 127)) for byte in data]
    return [repr(_float8(byte, *_FLOAT8[dtype])) for byte in data]


def _complex(real: float, imaginary: float) -> str:
    text = repr(imaginary)
    return f"{real!r}{'' if text.startswith('-') else '+'}{text}j"


def _float8(
    byte: int, exponent_bits: int, mantissa_bits: int, bias: int, has_inf: bool, fnuz: bool
) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    mantissa = byte & ((1 << mantissa_bits) - 1)
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    top = exponent == (1 << exponent_bits) - 1
    if fnuz and byte == 0x80:
        return nan
    if has_inf and top:
        return nan if mantissa else sign * inf
    if not has_inf and not fnuz and top and mantissa == (1 << mantissa_bits) - 1:
        return nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
