"""Random messages of any proto, mostly of values that mean something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

MAX_REPEATED = 3
MAX_DEPTH = 4
NUMBERS = (
    0, 1, -1, 2, 7, 8, 64, 255, 4096, 1 << 20, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63),
)  # fmt: skip
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e300, 1e-300, float("nan"), float("inf"), float("-inf"))
_WHOLE = {
    Field.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    Field.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    Field.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    Field.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


class Choices(Protocol):
    """What is asked of an `atheris.FuzzedDataProvider`."""

    def ConsumeIntInRange(self, least: int, most: int) -> int: ...
    def ConsumeInt(self, size: int) -> int: ...
    def ConsumeBytes(self, size: int) -> bytes: ...
    def ConsumeUnicodeNoSurrogates(self, size: int) -> str: ...
    def ConsumeFloat(self) -> float: ...


def pick(choices: Choices, values: Sequence[Any]) -> Any:
    """One of the values."""
    return values[choices.ConsumeIntInRange(0, len(values) - 1)]


def fill(
    choices: Choices, message: Message, known: Mapping[str, Sequence[Any]], depth: int = 0
) -> Message:
    """Sets fields at random; `known` has values worth trying, by the field's name."""
    for field in message.DESCRIPTOR.fields:
        if choices.ConsumeIntInRange(0, 7) == 0 or depth > MAX_DEPTH:
            continue
        count = choices.ConsumeIntInRange(0, MAX_REPEATED) if field.is_repeated else 1
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            continue
        for _ in range(count):
            if nested is None:
                _set(message, field, _value(choices, field, known))
            elif field.is_repeated:
                fill(choices, getattr(message, field.name).add(), known, depth + 1)
            else:
                part = getattr(message, field.name)
                part.SetInParent()
                fill(choices, part, known, depth + 1)
    return message


def _set(message: Message, field: Field, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def _value(choices: Choices, field: Field, known: Mapping[str, Sequence[Any]]) -> Any:
    if field.name in known and choices.ConsumeIntInRange(0, 15):
        return pick(choices, known[field.name])
    kind = field.cpp_type
    if kind in _WHOLE:
        least, most = _WHOLE[kind]
        number = (
            pick(choices, NUMBERS) if choices.ConsumeIntInRange(0, 3) else choices.ConsumeInt(8)
        )
        return min(max(number, least), most)
    if kind == Field.CPPTYPE_ENUM:
        return choices.ConsumeIntInRange(-1, 12)
    if kind == Field.CPPTYPE_BOOL:
        return bool(choices.ConsumeIntInRange(0, 1))
    if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return pick(choices, FLOATS) if choices.ConsumeIntInRange(0, 3) else choices.ConsumeFloat()
    size = choices.ConsumeIntInRange(0, 24)
    if field.type == Field.TYPE_BYTES:
        return choices.ConsumeBytes(size)
    return choices.ConsumeUnicodeNoSurrogates(size)
