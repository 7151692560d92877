"""What goes to stdout, in every format."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from rich.cells import cell_len

from paramd.cli.audit import detail_text
from paramd.cli.output import GAP, LEAST, Column, Format, Listing, emit, seconds, size, table_lines
from paramd.cli.tensors import WIDTH, bar, histogram

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


def test_a_table_keeps_names_whole_and_aligns() -> None:
    lines = written(Format.TABLE).splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "a", LONG, "total"]
    assert {len(line) for line in lines[1:]} == {len(LONG) + 2 + len("1,234,567")}
    assert lines[2].endswith("  1,234,567")


NAMES = [f"model.decoder.layers.{n}.self_attention.{p}.weight" for n in (1, 10, 11) for p in "qkv"]
MANY = Listing(
    name="params",
    rows=[{"name": name, "norm": 1234567.125, "zeros": n, "run": 1, "why": ""}
          for n, name in enumerate(NAMES)],
    columns=(
        Column("name", "NAME"),
        Column("norm", "NORM", str, right=True),
        Column("run", "INC", right=True, if_many=True),
        Column("zeros", "ZEROS", str, right=True, drop=1),
        Column("norm", "AGAIN", lambda n: f"{n:.7f}", right=True, drop=2),
        Column("why", "REASON"),
    ),
    about={},
)  # fmt: skip


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_a_table_fits_the_terminal_with_whole_numbers_and_names(width: int) -> None:
    lines, note = table_lines(MANY, width)
    assert max(map(len, lines)) <= width
    firsts = [line.split() for line in lines[1:]]
    assert "".join(first[0] for first in firsts) == "".join(NAMES)
    assert sum("1234567.125" in first for first in firsts) == len(NAMES)
    assert ("-o wide" in note) == ("AGAIN" in note) == ("AGAIN" not in lines[0]) == (width < 80)
    assert table_lines(MANY, None) == (table_lines(MANY, 1000)[0], "")


def test_prose_is_folded_between_words_and_a_terminal_too_narrow_loses_nothing() -> None:
    why = "the rank stopped at the boundary and says no more"
    listing = replace(MANY, rows=[{**MANY.rows[0], "why": why}])
    lines, _ = table_lines(listing, 60)
    assert max(map(len, lines)) <= 60
    assert {"boundary", "stopped"} <= set(" ".join(lines).split())
    assert table_lines(MANY, 10)[0] == table_lines(MANY, LEAST // 2 + GAP + len("1234567.125"))[0]


@pytest.mark.parametrize("width", [None, 30])
def test_columns_of_wide_characters_are_aligned(width: int | None) -> None:
    rows = [{"name": name, "count": 7} for name in ("層.重み", "layer.weight", "x" * 40)]
    lines, _ = table_lines(replace(LISTING, rows=rows[: 3 if width else 2], total=None), width)
    ends = {cell_len(line) for line in lines if line.endswith("7")}
    assert ends == {min(cell_len(lines[0].partition("  NOTE")[0]), width or 100)}


def test_a_terminal_is_told_of_what_is_missing_and_wide_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "50")
    out = Terminal()
    emit(MANY, Format.TABLE, out=out)
    assert NAMES[0] not in out.getvalue()
    assert "paramd: shown without" in capsys.readouterr().err
    emit(MANY, Format.WIDE, out=out)
    assert all(name in out.getvalue() for name in NAMES)
    assert capsys.readouterr().err == ""


def test_incarnations_are_a_column_when_there_are_several() -> None:
    assert "INC" not in table_lines(MANY, None)[0][0]
    several = replace(MANY, rows=[*MANY.rows, {**MANY.rows[0], "run": 2}])
    lines, _ = table_lines(several, None)
    assert "INC" in lines[0].split()
    assert lines[-1].split()[2] == "2"


def test_a_record_of_the_audit_reads_as_text() -> None:
    detail = {
        "id": "187a", "note": "", "assets": [], "dtype": None, "overwrite": False,
        "include": ["parameters", "buffers"], "before": {"nan_count": 0, "norm": 1.15630206714},
        "ops": [{"data": False, "op": "add", "pattern": "up.bias", "value": 0.1, "max": None}],
    }  # fmt: skip
    assert detail_text(detail) == (
        "before: nan count 0, norm 1.1563; id: 187a; include: parameters, buffers; "
        "ops: add 0.1 up.bias; overwrite: no"
    )


def test_json_is_one_document_and_has_no_nan() -> None:
    found = json.loads(written(Format.JSON), parse_constant=pytest.fail)
    assert found["step"] == 7
    assert found["params"][0] == {"name": "a", "count": 3, "mean": None}
    assert found["total"]["mean"] is None


def test_json_lines_are_complete_on_their_own() -> None:
    lines = [json.loads(line) for line in written(Format.JSONL).splitlines()]
    assert lines[1] == {"step": 7, "name": LONG, "count": 1234567, "mean": 0.5}
    assert len(lines) == 2


def test_names_are_names_alone() -> None:
    assert written(Format.NAME).splitlines() == ["a", LONG]


def test_no_rows_still_make_a_table_and_a_document() -> None:
    empty = Listing(name="params", rows=[], columns=LISTING.columns, about={})
    assert written(Format.TABLE, empty).split() == ["NAME", "COUNT", "NOTE"]
    assert json.loads(written(Format.JSON, empty)) == {"params": []}


def test_a_name_cannot_steer_the_terminal() -> None:
    evil = Listing(name="p", rows=[{"name": "a\x1b[31mb\nc"}], columns=LISTING.columns, about={})
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
