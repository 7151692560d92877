"""Shapes of REST: what pydantic writes of them, `read_document` reads again."""

import json
import math
from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter

from paramd.documents import Document, Finite, Record, Text, read_document


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner(Record):
    """A part."""

    name: Text
    size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer(Document):
    """A whole."""

    norm: Finite
    """Its norm."""
    parts: tuple[Inner, ...]
    step: int = -1


@pytest.mark.parametrize("norm", [1.5, math.nan, math.inf])
def test_what_is_written_is_read_again_with_nan_for_what_json_cannot_say(norm: float) -> None:
    outer = Outer(norm=norm, parts=(Inner(name="", size=None), Inner(name="a", size=3)))
    told = json.loads(TypeAdapter(Outer).dump_json(outer))
    shown = norm if math.isfinite(norm) else None
    parts = [{"name": None, "size": None}, {"name": "a", "size": 3}]
    assert told == {"norm": shown, "parts": parts, "step": -1}
    found = read_document(Outer, told)
    assert found.parts == outer.parts
    assert found.norm == norm or (math.isnan(found.norm) and shown is None)
