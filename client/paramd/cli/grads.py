"""`paramd grads`: gradient statistics, update by update."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli.options import Format, Globs, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, number, table_lines
from paramd.cli.shell import one_line, say
from paramd.cli.stats import NUMBERS

if TYPE_CHECKING:
    from paramd.mesh.frames.frames import GradFrame, Kind

BARS = "▁▂▃▄▅▆▇█"
SPARK_FRAMES = 24
SHOWN_ROWS = 40
"""Rows of the live table; `-o jsonl` has all."""

COLUMNS = (
    Column("name", "NAME"),
    *NUMBERS,
    Column("none", "NONE", drop=7),
)


@with_target
def grads(
    target: Target,
    glob: Globs,
    every: Annotated[int, typer.Option("--every", min=1, help="Updates between frames.")] = 1,
    frames: Annotated[
        int, typer.Option("-n", "--frames", min=0, help="Exit after N frames; 0: with the job.")
    ] = 0,
    with_histogram: Annotated[
        bool, typer.Option("--histogram", help="Also count elements by power of 2.")
    ] = False,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Sample this many rows of each tensor.")
    ] = None,
    output: Output = None,
) -> None:
    """Show live statistics of gradients, as updates consume them.

    Computed in place, over all ranks, each element once. Training never waits:
    frames that cannot keep up are dropped and counted. A terminal shows a table
    with the history of norms; -o jsonl prints one line per frame.
    """
    form = target.format
    kind: Kind = "histogram" if with_histogram else "stats"
    with target.connect() as mesh:
        found = _limited(mesh.grads(*glob, every=every, kind=kind, rows=rows), frames)
        if form in (Format.JSONL, Format.JSON):
            for frame in found:
                print(json.dumps(frame.document(), ensure_ascii=False), flush=True)
        elif form is Format.NAME:
            for name in _names(found):
                print(one_line(name))
        elif form is Format.TABLE and sys.stdout.isatty():
            _live(found)
        else:
            for frame in found:
                emit(listing(frame.document()), form)
                say(headline(frame.document()))


def listing(document: Mapping[str, Any]) -> Listing:
    """One frame, one row per gradient."""
    about = {key: document[key] for key in ("job", "incarnation", "step", "dropped")}
    total = {**document["total"], "name": "total"}
    return Listing(
        name="params", rows=document["params"], columns=COLUMNS, about=about, total=total
    )


def headline(document: Mapping[str, Any]) -> str:
    """A frame's summary line."""
    factor, scale = document["clip"]["factor"], document["scale"]
    clipped = "" if factor is None else f", clipped by {number(factor)}"
    scaled = "" if scale == 1 else f", scaled by {number(scale)}"
    dropped = f", {count(document['dropped'])} dropped before" if document["dropped"] else ""
    return (
        f"job {document['job']}, incarnation {document['incarnation']}, update {document['step']}"
        f"{clipped}{scaled}{dropped}"
    )


def spark(values: Sequence[float | None]) -> str:
    """Norms over time as bars, scaled from lowest to highest; a dot where there is none."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(BARS) - 1) if high > low else 1.0
    return "".join("·" if v is None else BARS[round((v - low) / step)] for v in values)


class History:
    """Norms of the last frames, by name."""

    def __init__(self) -> None:
        self._norms: dict[str, deque[float | None]] = {}

    def add(self, document: Mapping[str, Any]) -> None:
        """Append a frame's norms."""
        for row in (*document["params"], {**document["total"], "name": "total"}):
            norms = self._norms.setdefault(row["name"], deque(maxlen=SPARK_FRAMES))
            norms.append(row.get("norm"))

    def spark(self, name: str) -> str:
        """The norms of one name."""
        return spark(list(self._norms.get(name, ())))


def table_of(document: Mapping[str, Any], history: History, width: int) -> list[str]:
    """One frame as the lines of a live table that fits `width`."""
    found = listing(document)
    rows = [{**row, "norms": history.spark(row["name"])} for row in found.rows[:SHOWN_ROWS]]
    assert found.total is not None
    total = {**found.total, "norms": history.spark("total")}
    columns = (*COLUMNS, Column("norms", "NORMS"))
    lines, note = table_lines(replace(found, rows=rows, total=total, columns=columns), width)
    hidden = len(found.rows) - len(rows)
    if hidden:
        lines.append(f"... {count(hidden)} more; -o jsonl has all")
    return [*lines, headline(document), *([note] if note else [])]


def _live(found: Iterator[GradFrame[Any]]) -> None:
    from rich.live import Live
    from rich.text import Text

    history = History()
    with Live(auto_refresh=False, transient=False) as live:
        for frame in found:
            document = frame.document()
            history.add(document)
            lines = table_of(document, history, live.console.width)
            live.update(Text("\n".join(lines)), refresh=True)


def _names(found: Iterator[GradFrame[Any]]) -> list[str]:
    for frame in found:
        return [name for name in frame if name not in frame.none]
    return []


def _limited(found: Iterator[GradFrame[Any]], frames: int) -> Iterator[GradFrame[Any]]:
    for number_, frame in enumerate(found, 1):
        yield frame
        if number_ == frames:
            return
