"""Casts between floating-point dtypes, rounded as torch does, and strided copies, with numpy alone.

A sidecar without torch stays small. torch rounds to nearest, ties to even, and casts to 16 bits
by way of 32.
"""

import platform
from typing import Any

import numpy as np

from paramd.layout.types import Box

_NAN_BITS = 0x7FC0
_NAN_OF_FLOAT32 = 0xFFFF if platform.machine() in ("x86_64", "AMD64") else _NAN_BITS
"""On x86 torch's vectorized code writes all ones, except in the tail of a float64 cast."""
_QUIET = {"float16": 1 << 9, "float32": 1 << 22, "float64": 1 << 51}
"""The bit that conversion sets in a NaN, whose other bits stay."""


def cast_into(source: memoryview, dtype: str, target: memoryview, wanted: str) -> None:
    """Cast dense elements of `dtype` to `wanted`, both of `CAST_DTYPES`."""
    if wanted == "bfloat16":
        nan_bits = _NAN_BITS if dtype == "float16" else _NAN_OF_FLOAT32
        np.frombuffer(target, np.uint16)[:] = _to_bfloat16(_to_float32(source, dtype), nan_bits)
    elif dtype == "bfloat16" and wanted == "float32":
        np.frombuffer(target, np.float32)[:] = _to_float32(source, dtype)
    elif (dtype == "float64" and wanted == "float16") or dtype == "bfloat16":
        _store(target, wanted, _to_float32(source, dtype))
    else:
        _store(target, wanted, np.frombuffer(source, dtype))


def place(
    source: memoryview | bytearray,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    target: memoryview | bytearray,
    shape: tuple[int, ...],
    box: Box,
    width: int,
) -> None:
    """Copy elements of `width` bytes, which are strided in `source` (by `strides` elements), into a
    box of a dense `target` of `shape`."""
    element = np.dtype(f"V{width}") if width > 8 else np.dtype(f"u{width}")
    values = np.ndarray(sizes, element, source, strides=tuple(one * width for one in strides))
    inner = tuple(slice(b, e) for b, e in zip(box.begin, box.end, strict=True))
    np.frombuffer(target, element).reshape(shape)[inner] = values


def _store(target: memoryview, wanted: str, values: np.ndarray[Any, Any]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.frombuffer(target, wanted)
        np.copyto(found, values, casting="unsafe")
    nan = np.isnan(found)
    if not nan.any():
        return
    bits = found.view(f"u{found.itemsize}")
    if wanted == "float16":
        # numpy adds a bit to a NaN whose upper bits are 0.
        wide = values[nan].view(np.uint32)
        bits[nan] = (wide >> 16 & 0x8000 | 0x7C00 | wide >> 13 & 0x3FF).astype(np.uint16)
    bits[nan] |= bits.dtype.type(_QUIET[wanted])


def _to_float32(source: memoryview, dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    if dtype == "bfloat16":
        wide = np.frombuffer(source, np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.frombuffer(source, dtype).astype(np.float32, copy=False)


def _to_bfloat16(
    values: np.ndarray[Any, np.dtype[np.float32]], nan_bits: int
) -> np.ndarray[Any, np.dtype[np.uint16]]:
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    rounded[np.isnan(values)] = nan_bits
    return rounded.astype(np.uint16)
