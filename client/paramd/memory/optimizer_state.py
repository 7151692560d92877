"""Optimizer state in the optimizer memory, as the sidecar finds it without torch.

The trainer's record and its table (trainer/resume: keeper.py, state_record.py, optimizer_home.py)
list the place of each state tensor and the parameter of the arena it belongs to. State with the
dtype, shape and strides of its parameter corresponds to it byte by byte: the state of the element
at arena byte x is at byte `place + x - begin`. Other state is left out, with the reason. Places
from DEVICE_PLACES on are on the arena's device.

Record and table are written inside updates, while SEQ is odd. So bytes read while SEQ is even, by
a record of the page's own step, are of that step if SEQ has not changed since.

A snapshot has `OptimizerState.facts` as a separate table: its length, int64, then zlib-compressed
UTF-8 JSON. Numbers JSON lacks (NaN, infinities) are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from paramd.errors import UsageError
from paramd.layout.dtypes import DTYPES
from paramd.layout.types import cover_numel

DEVICE_PLACES = 1 << 48
"""The place of the first byte of state on a device."""

Read = Callable[[int, int], bytes]
"""Reads state: its place, and how many bytes."""

_SIZE = struct.Struct("=Q")
_SCALARS = {"float32": "=f", "float64": "=d", "int64": "=q", "int32": "=i"}
_INFINITE = ("nan", "inf", "-inf")
_MOST_DEPTH = 100

TABLE_BYTES = 1 << 20
"""Room for a table."""

_LENGTH = struct.Struct("=q")
MAX_TABLE_TEXT_BYTES = TABLE_BYTES - _LENGTH.size
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stated:
    """One parameter of an optimizer, and where its state lies."""

    begin: int
    """First byte in the arena."""
    size_bytes: int
    optimizer: int
    group: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    places: dict[str, int]
    """Place of each state tensor that corresponds to it."""
    scalars: Mapping[str, tuple[int, str]]
    """Place and dtype of each state tensor of one number."""
    left_out: dict[str, str]
    """State that is neither, with the reason."""
    others: Mapping[str, int]
    """State that is no tensor: its place among the record's others."""

    @property
    def end(self) -> int:
        return self.begin + self.size_bytes

    @property
    def has_state(self) -> bool:
        return bool(self.places or self.scalars or self.left_out)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The content of a table; `record` has the hyper-parameters."""

    params: Sequence[Stated]
    """By first byte in the arena."""
    classes: Sequence[str]
    """Class of each optimizer, with its module."""
    failure: str = ""
    """Why the trainer reported no more; else empty."""

    @property
    def keys(self) -> list[str]:
        """Kinds of state that correspond to parameters."""
        return list(dict.fromkeys(key for one in self.params for key in one.places))

    def pieces(self, key: str, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The places of the state of arena bytes [begin, end): (arena byte, place, size)."""
        first = max(bisect_right(self.params, begin, key=lambda one: one.begin) - 1, 0)
        found = []
        for one in self.params[first:]:
            if one.begin >= end:
                break
            low, high = max(begin, one.begin), min(end, one.end)
            if low < high and key in one.places:
                found.append((low, one.places[key] + low - one.begin, high - low))
        return found

    @staticmethod
    def _numbers(one: Stated, read: Read) -> dict[str, Any]:
        forms = {key: (place, _SCALARS[dtype]) for key, (place, dtype) in one.scalars.items()}
        return {
            key: _plain(struct.unpack(form, read(place, struct.calcsize(form)))[0])
            for key, (place, form) in forms.items()
        }

    def facts(self, record: Mapping[str, Any], read: Read, arena_bytes: int) -> dict[str, Any]:
        """Facts that a reader of the state needs beside its bytes; the proto documents the form."""
        others = record["others"]
        params = [
            {
                "begin": one.begin,
                "end": one.end,
                "dtype": one.dtype,
                "shape": one.shape,
                "strides": one.strides,
                "optimizer": one.optimizer,
                "group": one.group,
                "keys": list(one.places),
                "scalars": self._numbers(one, read),
                "others": {
                    key: others[number]
                    for key, number in one.others.items()
                    if number < len(others) and _is_number_or_none(others[number])
                },
                "left_out": dict(one.left_out),
            }
            for one in self.params
            if 0 <= one.begin < one.end <= arena_bytes
        ]
        return {
            "step": record["step"],
            "failure": self.failure,
            "threads": record.get("threads", 0),
            "classes": list(self.classes),
            "groups": record["groups"],
            "keys": self.keys,
            "params": params,
        }


def parse_state(table: bytes) -> OptimizerState:
    """Parse a table; UsageError if malformed, or of a version without parameters' places."""
    found = read_plain(table)
    try:
        params, classes = found["params"], found["classes"]
        states: dict[tuple[int, int], list[tuple[str, Any]]] = {}
        others = count()
        for number, index, key, described in found["entries"]:
            # The record's others are in the order of their entries.
            entry = described if described is not None else next(others)
            states.setdefault((number, index), []).append((str(key), entry))
        stated = [
            _stated(number, one, states.get((number, index), []))
            for number, of in enumerate(params)
            for index, one in enumerate(of)
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UsageError(f"the table of optimizer state cannot be read: {error!r}") from None
    stated = _once(stated)
    for one, other in pairwise(stated):
        if other.begin < one.end:
            # Columns of one matrix: a span of the arena does not determine a byte's element.
            for each in (one, other):
                each.left_out.update(dict.fromkeys(each.places, "parameters share its bytes"))
                each.places.clear()
    return OptimizerState(stated, classes, str(found.get("failure", "")))


def _once(stated: Sequence[Stated]) -> list[Stated]:
    """By first byte. A parameter that two optimizers list, of which one has state, is that one's:
    ZeroRedundancyOptimizer lists all, and has another inside for those that this rank updates.
    """
    found: dict[tuple[Any, ...], Stated] = {}
    for number, one in enumerate(stated):
        place: tuple[Any, ...] = (one.begin, one.end, one.shape, one.strides)
        known = found.get(place)
        if known is not None and known.has_state and one.has_state:
            place = (*place, number)
        if known is None or one.has_state:
            found[place] = one
    return sorted(found.values(), key=lambda one: one.begin)


def _stated(optimizer: int, param: Sequence[Any], state: Sequence[tuple[str, Any]]) -> Stated:
    begin, group, dtype, shape, strides = param
    item_bytes = DTYPES[dtype].item_bytes
    places: dict[str, int] = {}
    scalars: dict[str, tuple[int, str]] = {}
    left_out: dict[str, str] = {}
    others: dict[str, int] = {}
    for key, described in state:
        if isinstance(described, int):
            others[key] = described
            left_out[key] = "it is no tensor"
            continue
        place, _, its_dtype, its_shape, its_strides, _ = described
        if its_shape == shape and (shape or key != "step"):
            if its_strides != strides or DTYPES[its_dtype].item_bytes != item_bytes:
                left_out[key] = f"it is {its_dtype} with other strides or another size"
            elif its_dtype != dtype:
                left_out[key] = f"it is {its_dtype}, its parameter {dtype}"
            else:
                places[key] = place
        elif not its_shape and its_dtype in _SCALARS:
            scalars[key] = (place, its_dtype)
        else:
            left_out[key] = "it does not have the parameter's local shape"
    return Stated(
        begin,
        cover_numel(shape, strides) * item_bytes,
        optimizer,
        group,
        dtype,
        tuple(shape),
        tuple(strides),
        places,
        scalars,
        left_out,
        others,
    )


def read_record(data: bytes) -> dict[str, Any]:
    """The plain part of a record (step, groups, threads, others); UsageError if malformed."""
    found = read_plain(data)
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise UsageError("the continuation record has no step")
    wanted = {"groups": [], "others": [], "threads": 0}
    return {"step": found["step"]} | {name: found.get(name, wanted[name]) for name in wanted}


def read_plain(data: bytes) -> Any:
    """Decode trainer/resume/codec.py's encoding, with None for arrays and for longer tensors.

    Numbers that JSON lacks are the strings "nan", "inf" and "-inf".

    Raises:
        UsageError: If malformed.
    """
    try:
        (size,) = _SIZE.unpack_from(data)
        begin = _SIZE.size + size
        return _decoded(json.loads(data[_SIZE.size : begin]), memoryview(data)[begin:], _MOST_DEPTH)
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"the kept state cannot be read: {error!r}") from None


def _decoded(found: Any, blobs: memoryview, depth: int) -> Any:
    if not depth:
        raise ValueError("nested too deeply")
    if isinstance(found, list):
        return [_decoded(item, blobs, depth - 1) for item in found]
    if not isinstance(found, dict):
        return _plain(found)
    ((kind, value),) = found.items()
    if kind == "tuple":
        return [_decoded(item, blobs, depth - 1) for item in value]
    if kind in ("dict", "ordered", "counter"):
        pairs = (_decoded(pair, blobs, depth - 1) for pair in value)
        return {str(key): item for key, item in pairs}
    if kind == "tensor" and value[0] in _SCALARS and math.prod(value[1]) == 1:
        return _plain(struct.unpack_from(_SCALARS[value[0]], blobs, value[2])[0])
    return None


def _is_number_or_none(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or value in _INFINITE


def _plain(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def table_text(table: Mapping[str, Any]) -> bytes:
    """The compressed JSON alone."""
    return zlib.compress(json.dumps(table, allow_nan=False).encode(), 1)


def pack_table(table: Mapping[str, Any]) -> bytes:
    """A table; one that is too long becomes a table with that failure."""
    data = table_text(table)
    if len(data) > MAX_TABLE_TEXT_BYTES:
        failure = f"its table takes {len(data):,} bytes, more than there is space for"
        data = table_text({**table, "keys": [], "params": [], "groups": [], "failure": failure})
    return with_length(data)


def with_length(text: bytes) -> bytes:
    """A table of its text."""
    return _LENGTH.pack(len(text)) + text


def parse_table(memory: memoryview | bytes) -> dict[str, Any]:
    """Parse a table and ignore bytes after it; UsageError if there is none."""
    try:
        (length,) = _LENGTH.unpack_from(memory, 0)
        if not 0 <= length <= MAX_TABLE_TEXT_BYTES:
            raise ValueError(f"it says that it has {length} bytes")
    except (struct.error, ValueError) as error:
        raise UsageError(f"the table of state cannot be read: {error}") from None
    return parse_text(memory[_LENGTH.size : _LENGTH.size + length])


def parse_text(text: memoryview | bytes) -> dict[str, Any]:
    """The inverse of `table_text`; UsageError if malformed."""
    try:
        found = json.loads(zlib.decompressobj().decompress(text, _MAX_TEXT_BYTES))
    except (zlib.error, ValueError, RecursionError) as error:
        raise UsageError(f"the table of state cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UsageError("the table of state is no object")
    return found
