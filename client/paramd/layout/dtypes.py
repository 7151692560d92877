"""Facts about dtypes, without torch: one table."""

from __future__ import annotations

from dataclasses import dataclass

from paramd.errors import UsageError


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype and its names elsewhere; an empty one means that there is none."""

    name: str
    """torch's name, without its prefix."""
    item_bytes: int
    safetensors: str = ""
    """Name in a safetensors header."""
    storage: str = ""
    """torch's typed storage class; newer dtypes have none."""
    form: str = ""
    """`struct` format of one element."""
    reduced: str = ""
    """The dtype in which statistics are computed."""
    exponent: int = 0
    """Exponent mask, all set in NaN and infinities; 0 unless edits and exports compute with it."""


DTYPES: dict[str, Dtype] = {
    one.name: one
    for one in (
        Dtype("float64", 8, "F64", "DoubleStorage", "d", "float64", 0x7FF0_0000_0000_0000),
        Dtype("float32", 4, "F32", "FloatStorage", "f", "float32", 0x7F80_0000),
        Dtype("float16", 2, "F16", "HalfStorage", "e", "float32", 0x7C00),
        Dtype("bfloat16", 2, "BF16", "BFloat16Storage", "", "float32", 0x7F80),
        Dtype("float8_e4m3fn", 1, "F8_E4M3", "", "", "float32"),
        Dtype("float8_e5m2", 1, "F8_E5M2", "", "", "float32"),
        Dtype("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", "", "", "float32"),
        Dtype("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", "", "", "float32"),
        Dtype("float8_e8m0fnu", 1, "F8_E8M0"),
        Dtype("int64", 8, "I64", "LongStorage", "q", "float64"),
        Dtype("int32", 4, "I32", "IntStorage", "i", "float64"),
        Dtype("int16", 2, "I16", "ShortStorage", "h", "float32"),
        Dtype("int8", 1, "I8", "CharStorage", "b", "float32"),
        Dtype("uint64", 8, "U64", "", "Q", "float64"),
        Dtype("uint32", 4, "U32", "", "I", "float64"),
        Dtype("uint16", 2, "U16", "", "H", "float32"),
        Dtype("uint8", 1, "U8", "ByteStorage", "B", "float32"),
        Dtype("bool", 1, "BOOL", "BoolStorage", "?", "float32"),
        Dtype("complex64", 8, "C64", "ComplexFloatStorage"),
        Dtype("complex128", 16, "", "ComplexDoubleStorage"),
    )
}
"""All dtypes of tensors in a layout."""

ITEM_BYTES: dict[str, int] = {name: one.item_bytes for name, one in DTYPES.items()}

SAFETENSORS_NAMES: dict[str, str] = {
    name: one.safetensors for name, one in DTYPES.items() if one.safetensors
}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype` (a torch name without prefix); UsageError if unsupported."""
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise UsageError(
            f"dtype {dtype!r} is not supported; expected one of {', '.join(ITEM_BYTES)}"
        )
    return size


def safetensors_name(dtype: str) -> str:
    """The safetensors name of a torch dtype, for example "BF16"; UsageError if it has none."""
    name = SAFETENSORS_NAMES.get(dtype)
    if name is None:
        raise UsageError(
            f"safetensors files cannot hold dtype {dtype!r}; expected one of "
            f"{', '.join(SAFETENSORS_NAMES)}; cast the tensor or omit it"
        )
    return name
