"""Shapes of REST's answers: the control plane fills the very classes that users get.

A shape is a frozen dataclass below `Document`. The control plane writes it as JSON, by pydantic;
`read_document` reads it again, without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from html import escape
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

Shape = TypeVar("Shape")

_hints = functools.cache(get_type_hints)


def plain(value: Any) -> Any:
    """A result, which may be nested, as JSON can have it: NaN and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


class Shown:
    """A result, a dataclass: a short text, and a table in notebooks, without empty fields."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {text}" for name, text in self._told(40))
        return f"<paramd.{type(self).__name__} {told}>"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{n}</th><td>{escape(text)}</td></tr>" for n, text in self._told(200))
        return f"<table>{''.join(rows)}</table>"

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain dicts, lists, texts and numbers, for `json.dumps`."""
        return dict(plain(self))

    def _told(self, most: int) -> Iterator[tuple[str, str]]:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            text = f"{value:.10g}" if isinstance(value, float) else str(value)
            if value not in (None, "", ()):
                yield name, text if len(text) <= most else f"{text[: most - 3]}..."


class Document(Shown):
    """Base of the shapes: the OpenAPI document describes fields by their docstrings."""

    __slots__ = ()
    __pydantic_config__: ClassVar = {"json_schema_serialization_defaults_required": True}


class Record(Document):
    """A shape that also reads as its JSON object does: `op["pattern"]` is `op.pattern`."""

    __slots__ = ()

    def keys(self) -> Iterable[str]:
        return self.__dataclass_fields__.keys()

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.keys() else default


class _OrNull:
    """A field that is null in JSON unless its value passes a test."""

    def __init__(self, is_known: Callable[[Any], bool]) -> None:
        self._is_known = is_known

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], Any]) -> Any:
        # Schemas of pydantic are plain dicts: the client does without pydantic.
        told = {"type": "nullable", "schema": handler(kind)}
        how = {"type": "function-plain", "function": self._told, "return_schema": told}
        return {**told, "serialization": how}

    def _told(self, value: Any) -> Any:
        return value if value is not None and self._is_known(value) else None


Finite = Annotated[float, _OrNull(math.isfinite)]
"""A number; null where it is NaN or infinite, which JSON does not have."""

Text = Annotated[str, _OrNull(bool)]
"""Text; null where it is empty."""


def read_document(kind: Callable[..., Shape], found: Mapping[str, Any], **given: Any) -> Shape:
    """A dataclass from the fields of a JSON object that are called like its own, nested ones too.

    Null is no text, and no number. Fields that the object has otherwise, or not at all, have to be
    `given`.

    Raises:
        KeyError, TypeError, ValueError: If a field is missing, or of another type.
    """
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in given:
            given[one.name] = _read(_hints(kind)[one.name], found[one.name])
    return kind(**given)


def _read(kind: Any, value: Any) -> Any:
    whole, parts = get_origin(kind), get_args(kind)
    if type(None) in parts:
        return None if value is None else _read(parts[0], value)
    if whole is tuple:
        return tuple(_read(parts[0], one) for one in value)
    if whole is Mapping:
        return dict(value)
    if value is None and kind in (str, float):
        return "" if kind is str else math.nan
    make: Callable[..., Any] = kind
    return read_document(make, value) if is_dataclass(kind) else make(value)
