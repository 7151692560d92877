"""The header of a safetensors file: eight bytes of length, then JSON. Pure.

Source: huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes, safetensors_name

MAX_HEADER_BYTES = 100_000_000
"""Longer headers are refused by the readers."""

_METADATA = "__metadata__"
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What the header says of one tensor; `dtype` as torch names it, without its prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """As the reference writer does: wide elements first, so that every tensor is aligned."""
    return sorted(specs, key=lambda spec: -item_bytes(spec.dtype))


def encode_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON header, padded so that the data begins aligned.

    Raises:
        UsageError: a name twice or reserved, a dtype that the format has not, too long.
    """
    twice = [name for name, times in Counter(s.name for s in specs).items() if times > 1]
    if twice or any(spec.name == _METADATA for spec in specs):
        raise UsageError(f"tensor name {(twice or [_METADATA])[0]!r} can stand there only once")
    header: dict[str, object] = {_METADATA: dict(metadata)}
    begin = 0
    for spec in specs:
        end = begin + spec.size_bytes
        header[spec.name] = {
            "dtype": safetensors_name(spec.dtype),
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the header of {len(specs):,} tensors takes {len(text):,} bytes; readers take "
            f"{MAX_HEADER_BYTES:,}; write fewer tensors into one file"
        )
    return len(text).to_bytes(8, "little") + text
