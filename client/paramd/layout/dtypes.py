"""What is known of dtypes without torch: sizes and names in other worlds."""

from __future__ import annotations

from paramd.errors import UsageError

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by torch dtype without its prefix."""

SAFETENSORS_NAMES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""Names in a safetensors header; complex128 has none there."""

TORCH_NAMES: dict[str, str] = {theirs: ours for ours, theirs in SAFETENSORS_NAMES.items()}
"""The way back from a safetensors header."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype` (torch name without its prefix).

    Raises:
        UsageError: the dtype is not supported.
    """
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise UsageError(
            f"dtype {dtype!r} is not supported; expected one of {', '.join(ITEM_BYTES)}"
        )
    return size


def safetensors_name(dtype: str) -> str:
    """The safetensors name of a torch dtype, for example "BF16".

    Raises:
        UsageError: safetensors has no such dtype.
    """
    name = SAFETENSORS_NAMES.get(dtype)
    if name is None:
        raise UsageError(
            f"safetensors files cannot hold dtype {dtype!r}; expected one of "
            f"{', '.join(SAFETENSORS_NAMES)}; cast it or leave it out"
        )
    return name
