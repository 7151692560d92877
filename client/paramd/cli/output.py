"""Data on stdout: tables for people; JSON, JSON lines or names for programs."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TextIO

from paramd.cli import fitting
from paramd.cli.fitting import Cut
from paramd.cli.options import Format
from paramd.cli.shell import one_line, say

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table: the row's key, its heading, how to format a value."""

    key: str
    heading: str
    show: Callable[[Any], str] = str
    right: bool = False
    cut: Cut = ""
    """How its texts are made shorter where the terminal is narrow; numbers never are."""
    drop: int = 0
    """Where that is not enough, the highest is left out first; 0 always stays."""
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
    """Write a listing to stdout. NaN and infinities become null in JSON.

    Args:
        width: Of the terminal that `out` is shown on; None asks `out`.
    """
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
            print(_json({**listing.about, **row}), file=out)
    else:
        document = {**listing.about, listing.name: list(listing.rows)}
        if listing.total is not None:
            document["total"] = listing.total
        print(_json(document, indent=2), file=out)


def terminal_width(out: TextIO) -> int | None:
    """Characters of a line of the terminal; None where there is none, as in a pipe."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def table_lines(listing: Listing, width: int | None) -> tuple[list[str], str]:
    """Header, rows and total as lines that fit `width`, and what to say of what they lack.

    Without a width nothing is left out or cut, so that `grep` finds names whole.
    """
    columns = [c for c in listing.columns if not c.if_many or _values(listing, c.key) > 1]
    rows = [*listing.rows, *([listing.total] if listing.total is not None else [])]
    cells = [[c.heading, *(_cell(c, row) for row in rows)] for c in columns]
    widths = [max(map(len, column)) for column in cells]
    note = ""
    if width is not None and fitting.width_of(widths) > width:
        # An empty column says nothing, so it goes without a word.
        full = [at for at, column in enumerate(cells) if any(column[1:])]
        columns, cells = [columns[at] for at in full], [cells[at] for at in full]
        columns, cells, note = _fitted(columns, cells, width)
        widths = [max(map(len, column)) for column in cells]
    lines = []
    for line in zip(*cells, strict=True):
        padded = (
            cell.rjust(wide) if column.right else cell.ljust(wide)
            for cell, wide, column in zip(line, widths, columns, strict=True)
        )
        lines.append((" " * fitting.GAP).join(padded).rstrip())
    return lines, note


def _fitted(
    columns: Sequence[Column], cells: Sequence[list[str]], width: int
) -> tuple[list[Column], list[list[str]], str]:
    widths = [max(map(len, column)) for column in cells]
    cuts = [column.cut for column in columns]
    drops = [column.drop for column in columns]
    room = width
    while True:
        kept = fitting.chosen(widths, cuts, drops, room)
        wide = fitting.cut_widths([widths[at] for at in kept], [cuts[at] for at in kept], width)
        found = []
        for at, most in zip(kept, wide, strict=True):
            head, *texts = cells[at]
            cut = widths[at] > most
            found.append([head, *(fitting.shortened(texts, most, cuts[at]) if cut else texts)])
        over = fitting.width_of([max(map(len, column)) for column in found]) - width
        # Names that would become alike kept more than they were given: then a column goes.
        if over <= 0 or not any(drops[at] for at in kept):
            break
        room = fitting.least_of(widths, cuts, kept) - 1
    gone = [column.heading for at, column in enumerate(columns) if at not in kept]
    lacks = [f"without {', '.join(gone)}"] if gone else []
    lacks += (
        ["with texts cut at …"] if any("…" in text for column in found for text in column) else []
    )
    note = f"shown {' and '.join(lacks)}; -o wide, a wider terminal or -o json has all"
    return [columns[at] for at in kept], found, note if lacks else ""


def _values(listing: Listing, key: str) -> int:
    return len({row[key] for row in listing.rows if row.get(key)})


def _bold(text: str, out: TextIO) -> str:
    plain = not out.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\033[1m{text}\033[0m"


def _cell(column: Column, row: Row | None) -> str:
    value = row.get(column.key) if row is not None else None
    return "" if value is None else one_line(column.show(value))


def _json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(found) for key, found in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(found) for found in value]
    return value


def count(value: int) -> str:
    """An integer with thousands separators."""
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
    return f"{value_bytes:,.2f} TB"


def seconds(value_s: float) -> str:
    """A duration in a fitting unit."""
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
    """A moment in local time."""
    return datetime.fromtimestamp(time_s).astimezone().strftime("%m-%d %H:%M:%S")


def shape(value: Sequence[int]) -> str:
    """A shape such as "4x8"."""
    return "scalar" if not value else "x".join(str(s) for s in value)
