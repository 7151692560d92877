"""Data on stdout: tables for people; JSON, JSON lines or names for programs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TextIO

from paramd.cli.options import Format
from paramd.cli.shell import one_line

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table: the row's key, its heading, how to format a value."""

    key: str
    heading: str
    show: Callable[[Any], str] = str
    right: bool = False


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
    id_key: str = "fqn"
    """The key that `-o name` prints."""


def emit(listing: Listing, form: Format, *, out: TextIO | None = None) -> None:
    """Write a listing to stdout. NaN and infinities become null in JSON."""
    out = out if out is not None else sys.stdout
    if form is Format.TABLE:
        _table(listing, out)
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


def _table(listing: Listing, out: TextIO) -> None:
    """Never truncates: long names stay whole, so that `grep` finds them."""
    columns = listing.columns
    rows = [[_cell(column, row) for column in columns] for row in listing.rows]
    head = [column.heading for column in columns]
    total = [_cell(column, listing.total) for column in columns] if listing.total else None
    below = [total] if total is not None else []
    widths = [max(map(len, cells)) for cells in zip(head, *rows, *below, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        )
        return "  ".join(padded).rstrip()

    print(_bold(line(head), out), file=out)
    for cells in rows:
        print(line(cells), file=out)
    for cells in below:
        print(_bold(line(cells), out), file=out)


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
