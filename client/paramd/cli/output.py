"""Data on stdout: tables for people; JSON, JSON lines or names for programs."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TextIO

from paramd.cli.shell import one_line, say
from paramd.layout.stats import finite

Row = Mapping[str, Any]

GAP = 2
"""Spaces between columns."""

LEAST = 24
"""Texts are folded down to this width before a column is left out; then down to half of it."""


class Format(StrEnum):
    """Output format of data on stdout."""

    TABLE = "table"
    WIDE = "wide"
    """A table with all columns, whatever the width of the terminal."""
    JSON = "json"
    JSONL = "jsonl"
    NAME = "name"

    @property
    def is_table(self) -> bool:
        """For people, not for programs."""
        return self in (Format.TABLE, Format.WIDE)


@dataclass(frozen=True)
class Column:
    """One column of a table: the row's key, its heading, how to format a value."""

    key: str
    heading: str
    show: Callable[[Any], str] = str
    right: bool = False
    """Numbers: never folded."""
    drop: int = 0
    """Where folding is not enough, the highest is left out first; 0 always stays."""
    if_many: bool = False
    """Left out of tables whose rows all have the same value."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Rows of one kind, with the facts that all of them share."""

    name: str
    """Key of the rows in the JSON document."""
    rows: Sequence[Row]
    columns: Sequence[Column]
    about: Row
    """Job, incarnation, step and so on: top-level keys in JSON, repeated in every JSON line."""
    total: Row | None = None
    """A totals row of the same columns."""
    id_key: str = "name"
    """The key that `-o name` prints."""


def emit(
    listing: Listing, form: Format, *, out: TextIO | None = None, width: int | None = None
) -> None:
    """Write a listing to stdout, in JSON with null for NaN; `width`: None asks `out`'s terminal."""
    out = out if out is not None else sys.stdout
    if form.is_table:
        width = width if width is not None else terminal_width(out)
        lines, note = table_lines(listing, None if form is Format.WIDE else width)
        last = len(lines) - 1 if listing.total is not None else 0
        for number, line in enumerate(lines):
            print(_bold(line, out) if number in (0, last) else line, file=out)
        if note:
            out.flush()
            say(note)
    elif form is Format.NAME:
        for row in listing.rows:
            print(one_line(str(row[listing.id_key])), file=out)
    elif form is Format.JSONL:
        for row in listing.rows:
            print(json_text({**listing.about, **row}), file=out)
    else:
        document = {**listing.about, listing.name: list(listing.rows)}
        if listing.total is not None:
            document["total"] = listing.total
        print(json_text(document, indent=2), file=out)


def terminal_width(out: TextIO) -> int | None:
    """Characters of a line of the terminal; None where there is none, as in a pipe."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def table_lines(listing: Listing, width: int | None) -> tuple[list[str], str]:
    """Header, rows and total as lines that fit `width`, and a remark on what they lack.

    No text is cut: long texts continue below. Without a width nothing is left out or folded, so
    that `grep` finds names whole.
    """
    from rich.cells import cell_len

    columns = [c for c in listing.columns if not c.if_many or _values(listing, c.key) > 1]
    rows = [*listing.rows, *([listing.total] if listing.total is not None else [])]
    cells = [[c.heading, *(cell(c, row) for row in rows)] for c in columns]
    found = [(c, texts, max(map(cell_len, texts))) for c, texts in zip(columns, cells, strict=True)]
    if width is None or _width(wide for _, _, wide in found) <= width:
        return _whole(found), ""
    # An empty column is left out without a remark.
    found = [one for one in found if any(one[1][1:])]
    gone = []
    while _least(found, LEAST) > width:
        first = max(found, key=lambda one: one[0].drop)
        if not first[0].drop:
            break
        found.remove(first)
        gone.append(first[0].heading)
    note = f"shown without {', '.join(gone)}; -o wide, a wider terminal or -o json has all"
    # Where even that is too much, the terminal folds the lines.
    return _folded(found, max(width, _least(found, LEAST // 2))), note if gone else ""


_Cells = tuple[Column, list[str], int]
"""A column, its heading and texts, and the width of the widest."""


def _width(widths: Iterable[int]) -> int:
    return sum(width + GAP for width in widths) - GAP


def _least(found: Sequence[_Cells], most: int) -> int:
    """Width of a line whose texts are folded at `most` characters."""
    return _width(wide if column.right else min(wide, most) for column, _, wide in found)


def _whole(found: Sequence[_Cells]) -> list[str]:
    # rich takes half a millisecond for a row, so it is left for tables that have to be folded.
    from rich.cells import cell_len

    def padded(column: Column, text: str, width: int) -> str:
        pad = " " * (width - cell_len(text))
        return pad + text if column.right else text + pad

    columns = ([padded(c, text, wide) for text in texts] for c, texts, wide in found)
    return [(" " * GAP).join(line).rstrip() for line in zip(*columns, strict=True)]


def _folded(found: Sequence[_Cells], width: int) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for column, texts, _ in found:
        table.add_column(
            texts[0],
            justify="right" if column.right else "left",
            no_wrap=column.right,
            overflow="fold",
        )
    for row in zip(*(texts[1:] for _, texts, _ in found), strict=True):
        table.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _values(listing: Listing, key: str) -> int:
    return len({row[key] for row in listing.rows if row.get(key)})


def _bold(text: str, out: TextIO) -> str:
    plain = not out.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\033[1m{text}\033[0m"


def cell(column: Column, row: Row | None) -> str:
    """A row's text in a column."""
    value = row.get(column.key) if row is not None else None
    return "" if value is None else one_line(column.show(value))


_MARKS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that reorder a terminal's text, or command it, and halves of characters, which no
output takes; JSON itself escapes the rest."""


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON that has no effect on a terminal, whatever text of others is in it."""
    text = json.dumps(finite(value), indent=indent, allow_nan=False, ensure_ascii=False)
    return _MARKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def count(value: int) -> str:
    return f"{value:,}"


def number(value: float) -> str:
    """A float with four significant digits; JSON has all of them."""
    return f"{value:.4g}"


def size(value_bytes: float) -> str:
    """Bytes in decimal units, three significant digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if value_bytes < 1000:
            return f"{value_bytes:.3g} {unit}"
        value_bytes /= 1000
    return f"{value_bytes:{',.2f' if value_bytes < 1e6 else '.3g'}} TB"


def seconds(value_s: float) -> str:
    if not abs(value_s) < 1e12:  # NaN, too
        return f"{value_s:.3g} s"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 1:
        return f"{value_s * 1e3:.0f} ms"
    if value_s < 120:
        return f"{value_s:.1f} s"
    minutes, left_s = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left_s} s"


def when(time_s: float) -> str:
    """A moment in local time; an invalid number unchanged."""
    try:
        return datetime.fromtimestamp(time_s).astimezone().strftime("%m-%d %H:%M:%S")
    except (OSError, OverflowError, ValueError):
        return f"{time_s:.3g}"


def shape(value: Sequence[int]) -> str:
    return "scalar" if not value else "x".join(str(s) for s in value)
