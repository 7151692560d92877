"""What goes to stdout, in every format."""

from __future__ import annotations

import io
import json
import math

import pytest

from paramd.cli.options import Format
from paramd.cli.output import Column, Listing, emit, seconds, size
from paramd.cli.stats import WIDTH, bar, histogram

LONG = "layers.0." + "x" * 200
LISTING = Listing(
    name="params",
    rows=[
        {"fqn": "a", "count": 3, "mean": math.nan},
        {"fqn": LONG, "count": 1234567, "mean": 0.5},
    ],
    columns=(
        Column("fqn", "NAME"),
        Column("count", "COUNT", lambda n: f"{n:,}", right=True),
        Column("missing", "NOTE"),
    ),
    about={"step": 7},
    total={"fqn": "total", "count": 1234570, "mean": math.inf},
)


def written(form: Format, listing: Listing = LISTING) -> str:
    out = io.StringIO()
    emit(listing, form, out=out)
    return out.getvalue()


def test_a_table_keeps_names_whole_and_aligns() -> None:
    lines = written(Format.TABLE).splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "a", LONG, "total"]
    assert {len(line) for line in lines[1:]} == {len(LONG) + 2 + len("1,234,567")}
    assert lines[2].endswith("  1,234,567")


def test_json_is_one_document_and_has_no_nan() -> None:
    found = json.loads(written(Format.JSON), parse_constant=pytest.fail)
    assert found["step"] == 7
    assert found["params"][0] == {"fqn": "a", "count": 3, "mean": None}
    assert found["total"]["mean"] is None


def test_json_lines_are_complete_on_their_own() -> None:
    lines = [json.loads(line) for line in written(Format.JSONL).splitlines()]
    assert lines[1] == {"step": 7, "fqn": LONG, "count": 1234567, "mean": 0.5}
    assert len(lines) == 2


def test_names_are_names_alone() -> None:
    assert written(Format.NAME).splitlines() == ["a", LONG]


def test_no_rows_still_make_a_table_and_a_document() -> None:
    empty = Listing(name="params", rows=[], columns=LISTING.columns, about={})
    assert written(Format.TABLE, empty).split() == ["NAME", "COUNT", "NOTE"]
    assert json.loads(written(Format.JSON, empty)) == {"params": []}


def test_a_name_cannot_steer_the_terminal() -> None:
    evil = Listing(name="p", rows=[{"fqn": "a\x1b[31mb\nc"}], columns=LISTING.columns, about={})
    for form in (Format.TABLE, Format.NAME):
        assert "\x1b" not in written(form, evil)
        assert "a [31mb c" in written(form, evil)


def test_a_histogram_has_a_bar_for_every_bin_in_use() -> None:
    lines = histogram([(-2, 1000), (-1, 0), (0, 1)], zero_count=500)
    assert [line.split()[0] for line in lines] == ["0", "2^-2", "2^-1", "2^0"]
    assert [line.split()[-1] for line in lines] == ["500", "1,000", "0", "1"]
    assert "█" * WIDTH in lines[1]
    assert "█" not in lines[2]
    assert bar(1, 10**9) == "▏"
    assert histogram([]) == []


@pytest.mark.parametrize(
    ("value_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1.75e6, "1.75 MB"), (2e12, "2.00 TB")]
)
def test_sizes_are_decimal(value_bytes: float, text: str) -> None:
    assert size(value_bytes) == text


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(2e-6, "2 us"), (0.0123, "12 ms"), (1.25, "1.2 s"), (125, "2 min 5 s"), (7260, "2 h 1 min")],
)
def test_durations_take_the_unit_that_fits(value_s: float, text: str) -> None:
    assert seconds(value_s) == text
