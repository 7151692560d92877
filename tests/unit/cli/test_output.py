"""What goes to stdout, in every format."""

import importlib
import io
import json
import math
import pkgutil
from collections.abc import Iterator

import pytest

import paramd.cli
from paramd.cli.audit import detail_text
from paramd.cli.output import Column, Format, Listing, cell, emit
from paramd.mesh.edits.calls import op_text

LONG = "layers.0." + "x" * 200
LISTING = Listing(
    name="params",
    rows=[
        {"name": "a", "count": 3, "mean": math.nan},
        {"name": LONG, "count": 1234567, "mean": 0.5},
    ],
    columns=(
        Column("name", "NAME"),
        Column("count", "COUNT", lambda n: f"{n:,}", right=True),
        Column("missing", "NOTE"),
    ),
    about={"step": 7},
    total={"name": "total", "count": 1234570, "mean": math.inf},
)


def written(form: Format, listing: Listing = LISTING) -> str:
    out = io.StringIO()
    emit(listing, form, out=out)
    return out.getvalue()


def test_json_is_one_document_and_has_no_nan() -> None:
    found = json.loads(written(Format.JSON), parse_constant=pytest.fail)
    assert found["step"] == 7
    assert found["params"][0] == {"name": "a", "count": 3, "mean": None}
    assert found["total"]["mean"] is None


@pytest.mark.parametrize("form", [Format.JSON, Format.JSONL])
def test_json_has_nothing_that_a_terminal_obeys(form: Format) -> None:
    name = "a\x1b[2J\x9b2J\x7f\u061c\u200f\u202e\u2067\u2028\xfc"
    text = written(form, Listing(name="p", rows=[{"name": name}], columns=(), about={}))
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    found = json.loads(text)
    assert (found["p"][0] if form is Format.JSON else found)["name"] == name
    assert "\xfc" in text


def test_a_name_cannot_steer_the_terminal() -> None:
    evil = Listing(name="p", rows=[{"name": "a\x1b[31mb\nc"}], columns=LISTING.columns, about={})
    for form in (Format.TABLE, Format.NAME):
        assert "\x1b" not in written(form, evil)
        assert "a [31mb c" in written(form, evil)


HOSTILE = (
    None, math.nan, math.inf, -math.inf, -0.0, 0, -1, 2**62, 2**64, 1e308, -1e308, 5e-324
)  # fmt: skip
NO_NUMBERS = {"LINES", "SHAPE"}


def columns() -> Iterator[Column]:
    """Of all tables of the command line."""
    for found in pkgutil.iter_modules(paramd.cli.__path__):
        if found.name != "__main__":
            module = importlib.import_module(f"paramd.cli.{found.name}")
            yield from (c for v in vars(module).values() if isinstance(v, tuple) for c in v
                        if isinstance(c, Column))  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:8])
def test_any_number_is_told_in_every_table_and_in_the_audit(value: float | None) -> None:
    numeric = [one for one in columns() if one.right and one.heading not in NO_NUMBERS]
    assert len(numeric) > 80
    for one in numeric:
        assert len(cell(one, {one.key: value})) < 400, one.heading
    op = {"op": "fill", "pattern": "w", "value": value}
    assert op_text(op).startswith("fill ")
    assert "fill" in detail_text({"ops": [op], "value": value, "nested": {"value": value}})
    assert detail_text({"ops": [op | {"value": 1 + 2j}]}) == "ops: fill (1+2j) w"
