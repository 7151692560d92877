"""Extra state in an export: what a state dict has beside parameters and buffers. Pure.

Tensors are written under their names, values that are JSON into a file of their own; the rest is
named in the manifest, with the reason (trainer/model/extra_state.py).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.types import TensorKind, TensorLayout

EXTRA_STATE_BYTES = 512 << 10
"""Most bytes of extra state in an export, and of one rank: tensors, and values as JSON."""

NOT_ASKED = "extra state is exported with the buffers"

Table = Mapping[str, Mapping[str, Any]]
"""By name, as trainer/model/extra_state.py notes it."""


def too_large(size_bytes: int) -> str:
    """Why extra state of that size is left out."""
    return f"it has {size_bytes:,} bytes; at most {EXTRA_STATE_BYTES:,} are kept of all together"


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor of extra state."""

    layout: TensorLayout
    """Without pieces."""
    data: bytes
    """Row-major."""


@dataclass(frozen=True, slots=True)
class ExtraState:
    """The extra state of a job at one step. Made of what ranks say: UsageError if malformed."""

    table: Table

    def __post_init__(self) -> None:
        for name, one in self.table.items():
            kinds = {"data", "value", "why"}.intersection(one) if isinstance(one, Mapping) else ()
            if len(kinds) != 1 or not isinstance(one.get("data", ""), str):
                raise UsageError(f"extra state {name!r} is malformed: no data, value or reason")

    @classmethod
    def merged(cls, tables: Iterable[Table]) -> ExtraState:
        """Each name's state as the first rank that has it; no more than `EXTRA_STATE_BYTES`."""
        found: dict[str, Mapping[str, Any]] = {}
        left_bytes = EXTRA_STATE_BYTES
        for told in map(cls, tables):
            for name, one in told.table.items():
                if name not in found or "why" in found[name]:
                    data, value = one.get("data"), one.get("value", "")
                    size_bytes = len(data) * 3 // 4 if data is not None else len(json.dumps(value))
                    kept = size_bytes <= left_bytes
                    found[name] = one if kept else {"why": too_large(size_bytes)}
                    left_bytes -= size_bytes * kept
        return cls(found)

    @property
    def constants(self) -> dict[str, Constant]:
        """Its tensors, by name; UsageError if malformed."""
        return {name: _constant(name, one) for name, one in self.table.items() if "data" in one}

    @property
    def values(self) -> dict[str, Any]:
        """What is JSON, by name."""
        return {name: one["value"] for name, one in self.table.items() if "value" in one}

    @property
    def kept(self) -> set[str]:
        """The names of both."""
        return {name for name, one in self.table.items() if "why" not in one}

    def of(self, patterns: Iterable[str]) -> ExtraState:
        """The part that patterns match."""
        return ExtraState({n: self.table[n] for n in matching(self.table, tuple(patterns))})


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The names that patterns match, in their order; without patterns all."""
    if not patterns:
        return tuple(names)
    return tuple(n for n in names if any(n == one or fnmatchcase(n, one) for one in patterns))


def _constant(name: str, one: Mapping[str, Any]) -> Constant:
    try:
        shape, dtype = tuple(map(int, one["shape"])), str(one["dtype"])
        data = base64.b64decode(one["data"], validate=True)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"extra state {name!r} is malformed: {error!r}") from None
    if min(shape, default=0) < 0 or prod(shape) * item_bytes(dtype) != len(data):
        raise UsageError(f"extra state {name!r} has {len(data)} bytes for {shape} of {dtype}")
    return Constant(TensorLayout(name, dtype, shape, TensorKind.BUFFER, ()), data)
