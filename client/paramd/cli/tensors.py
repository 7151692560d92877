"""`paramd params`, `stats` and `grads`: what tensors there are, and their statistics."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from paramd.cli import completion
from paramd.cli.options import AnyGlobs, Buffers, Globs, Target, with_output
from paramd.cli.output import (
    Column,
    Format,
    Listing,
    count,
    emit,
    json_text,
    number,
    seconds,
    shape,
    table_lines,
)
from paramd.cli.parts import LOOK, CommandPart, Commands
from paramd.cli.shell import one_line, say
from paramd.filters import parse_filter
from paramd.layout.stats import STATISTICS

if TYPE_CHECKING:
    from paramd.mesh.frames.frames import GradFrame, Kind
    from paramd.mesh.results import ParamInfo, StatsTable, TensorStats

WIDTH = 40
"""Characters of the longest bar."""

_EIGHTHS = " ▏▎▍▌▋▊▉"

BARS = "▁▂▃▄▅▆▇█"
SPARK_FRAMES = 24
SHOWN_ROWS = 40
"""Rows of the live table; `-o jsonl` has all."""

PARAM_COLUMNS = (
    Column("name", "NAME"),
    Column("shape", "SHAPE", shape, right=True),
    Column("dtype", "DTYPE", drop=2),
    Column("numel", "ELEMENTS", count, right=True, drop=1),
    Column("placement", "PLACEMENT"),
    Column("trainable", "TRAINABLE", lambda value: "yes" if value else "no", drop=4),
    Column("aliases", "TIED TO", ", ".join, drop=3),
)


@with_output
def params(
    target: Target,
    wanted: Annotated[
        list[str] | None,
        Argument(
            metavar="FILTER",
            autocompletion=completion.names,
            help="Name patterns, and terms that must all hold, such as 'numel>1M' "
            "'dtype=bfloat16' 'shape=4096x*' 'norm>10' 'nan>0'. Default: everything.",
        ),
    ] = None,
    buffers: Buffers = False,
    trainable: Annotated[
        bool | None,
        Option(
            "--trainable/--frozen",
            show_default=False,
            help="Only parameters that did, or did not, require a gradient at attach.",
        ),
    ] = None,
) -> None:
    """List parameters: full shape, dtype and how they are distributed.

    Terms compare name, placement, kind, dtype, shape, numel, dims, rank, tied
    and trainable. Terms on norm, mean, std, min, max, absmax, nan, inf and
    zero first compute statistics of all tensors that match the other terms.
    """
    chosen = parse_filter(" ".join(wanted if wanted is not None else ()))
    with target.connect() as mesh:
        found = mesh.params(*chosen.words, buffers=buffers, trainable=trainable)
        about: dict[str, Any] = {"job": mesh.job, "incarnation": mesh.incarnation}
        if found.step >= 0:
            about |= {"step": found.step, "unsettled": found.unsettled}
    rows = [param_row(info) for info in found]
    target.show("params", rows, PARAM_COLUMNS, **about)
    say(f"{len(rows):,} tensors, {sum(info.numel for info in found):,} elements")


def param_row(info: ParamInfo) -> dict[str, object]:
    """One tensor's row."""
    return {
        "name": info.name,
        "dtype": info.dtype,
        "numel": info.numel,
        "placement": info.placement,
        "shape": list(info.shape),
        "kind": info.kind.value,
        "trainable": info.trainable,
        "aliases": [name for name in info.names if name != info.name],
        "ranks": list(info.ranks),
    }


NUMBERS = tuple(
    Column(
        one.name,
        one.title.upper(),
        count if one.kind is int else number,
        right=True,
        # Norm, NaN and Inf stay: they show problems.
        drop={"zero_count": 5, "mean": 4, "std": 3, "min": 2, "max": 1}.get(one.name, 0),
    )
    for one in STATISTICS
)
STATS_COLUMNS = (
    Column("name", "NAME"),
    Column("count", "COUNT", count, right=True, drop=6),
    *NUMBERS,
)


def histogram(exponents: Sequence[tuple[int, int]], *, zero_count: int = 0) -> list[str]:
    """One line per bin: lower bound, bar, count.

    `exponents`: (e, count) of 2**e <= |x| < 2**(e+1), ascending. Elements that are exactly zero
    (`zero_count`) get a separate line.
    """
    rows = [(f"2^{exponent}", found) for exponent, found in exponents]
    if zero_count:
        rows.insert(0, ("0", zero_count))
    most = max((found for _, found in rows), default=0)
    return [f"{name:>6} {bar(found, most):<{WIDTH}} {found:,}".rstrip() for name, found in rows]


def bar(value: int, most: int) -> str:
    """A bar for `value`, `WIDTH` characters at `most`; never empty for a value above 0."""
    if value <= 0:
        return ""
    whole, left = divmod(max(1, round(8 * WIDTH * value / most)), 8)
    return "█" * whole + (_EIGHTHS[left] if left else "")


@with_output
def stats(
    target: Target,
    glob: AnyGlobs = None,
    with_histogram: Annotated[
        bool, Option("--histogram", help="Count elements by power of 2.")
    ] = False,
    buffers: Buffers = False,
    unsettled: Annotated[
        bool,
        Option(
            "--unsettled", help="Accept weights that changed since the last update, as they are."
        ),
    ] = False,
) -> None:
    """Show statistics of full tensors, all at one step.

    Computed in place by the sidecars. Each element counts once, however many
    ranks hold it. Norm, mean, std, min and max cover the finite elements; NAN
    and INF count the others. The last line is the total, unless terms on
    statistics left tensors out.
    """
    began_s = time.monotonic()
    with target.connect() as mesh:
        asked_s = time.monotonic()
        found = mesh.stats(
            *(glob or ()), buffers=buffers, histogram=with_histogram, unsettled=unsettled
        )
    from paramd.mesh.results import unsettled_text

    age_s = time.monotonic() - asked_s
    form = target.format
    emit(listing(found, age_s=age_s, with_histogram=with_histogram), form)
    if with_histogram and form.is_table:
        print_histograms(found)
    rests = unsettled_text(unsettled=found.unsettled, label=found.label)
    say(
        f"job {found.job}, run {found.incarnation}, step {found.step}{rests}, at most "
        f"{seconds(age_s)} old ({seconds(time.monotonic() - began_s)} total)"
    )


def listing(found: StatsTable, *, age_s: float, with_histogram: bool) -> Listing:
    """One row per tensor. `age_s` is an upper bound: the time since the request."""
    return Listing(
        name="stats",
        rows=[
            {"name": row.name, "shape": list(row.shape), "dtype": row.dtype}
            | _numbers(row, with_histogram)
            for row in found
        ],
        columns=STATS_COLUMNS,
        about={
            "job": found.job,
            "incarnation": found.incarnation,
            "step": found.step,
            "unsettled": found.unsettled,
            "label": found.label,
            "age_s": age_s,
        },
        total={**_numbers(found.total, with_histogram), "name": "total"} if found.whole else None,
    )


def print_histograms(found: StatsTable) -> None:
    """Print a histogram of binary exponents for each tensor to stdout."""
    for row in found:
        summary = row.summary
        print(f"\n{one_line(row.name)}: elements x by the power of 2 at or below |x|")
        for line in histogram(summary.exponents, zero_count=summary.zero_count):
            print(line)


def _numbers(row: TensorStats, with_histogram: bool) -> dict[str, Any]:
    found: dict[str, Any] = row.summary.numbers()
    if with_histogram:
        found["exponents"] = [list(bin_) for bin_ in row.summary.exponents]
    return found


GRAD_COLUMNS = (Column("name", "NAME"), *NUMBERS, Column("none", "NONE", drop=7))


@with_output
def grads(
    target: Target,
    glob: Globs,
    every: Annotated[
        int, Option("--every-steps", min=1, help="Updates from one frame to the next.")
    ] = 1,
    frames: Annotated[
        int, Option("-n", "--frames", min=0, help="Stop after N frames; 0: when the job ends.")
    ] = 0,
    with_histogram: Annotated[
        bool, Option("--histogram", help="Also count elements by power of 2.")
    ] = False,
    rows: Annotated[
        int | None, Option("--rows", min=1, help="Sample this many rows of each tensor.")
    ] = None,
) -> None:
    """Show live statistics of gradients, as updates consume them.

    Computed in place, over all ranks, each element once. Training never waits:
    frames that cannot keep up are dropped and counted. A terminal shows a table
    with the history of norms; -o jsonl prints one line per frame.
    """
    form = target.format
    kind: Kind = "histogram" if with_histogram else "stats"
    with target.connect() as mesh:
        found = mesh.grads(*glob, every=every, kind=kind, rows=rows)
        found = islice(found, frames if frames else None)
        if form in (Format.JSONL, Format.JSON):
            for frame in found:
                print(json_text(frame.document()), flush=True)
        elif form is Format.NAME:
            for frame in islice(found, 1):
                for name in (name for name in frame if name not in frame.none):
                    print(one_line(name))
        elif form is Format.TABLE and sys.stdout.isatty():
            _live(found)
        else:
            for frame in found:
                emit(frame_listing(frame.document()), form)
                say(headline(frame.document()))


def frame_listing(document: Mapping[str, Any]) -> Listing:
    """One frame, one row per gradient."""
    about = {key: document[key] for key in ("job", "incarnation", "step", "dropped")}
    total = {**document["total"], "name": "total"}
    return Listing(
        name="params", rows=document["params"], columns=GRAD_COLUMNS, about=about, total=total
    )


def headline(document: Mapping[str, Any]) -> str:
    """A frame's summary line."""
    factor, scale = document["clip"]["factor"], document["scale"]
    clipped = "" if factor is None else f", clipped by {number(factor)}"
    scaled = "" if scale == 1 else f", scaled by {number(scale)}"
    dropped = f", {count(document['dropped'])} dropped before" if document["dropped"] else ""
    return (
        f"job {document['job']}, run {document['incarnation']}, update {document['step']}"
        f"{clipped}{scaled}{dropped}"
    )


def spark(values: Sequence[float | None]) -> str:
    """Norms over time as bars, scaled from lowest to highest; a dot where there is none."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(BARS) - 1) if high > low else 1.0
    return "".join("·" if v is None else BARS[round((v - low) / step)] for v in values)


def table_of(frames: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """The last of these frames as the lines of a live table that fits `width`."""
    document = frames[-1]
    found = frame_listing(document)
    past = [{row["name"]: row.get("norm") for row in one["params"]} for one in frames]
    rows = [
        {**row, "norms": spark([norms.get(row["name"]) for norms in past])}
        for row in found.rows[:SHOWN_ROWS]
    ]
    assert found.total is not None
    total = {**found.total, "norms": spark([one["total"].get("norm") for one in frames])}
    columns = (*GRAD_COLUMNS, Column("norms", "NORMS"))
    lines, note = table_lines(replace(found, rows=rows, total=total, columns=columns), width)
    hidden = len(found.rows) - len(rows)
    if hidden:
        lines.append(f"... {count(hidden)} more; -o jsonl has all")
    return [*lines, headline(document), *([note] if note else [])]


def _live(found: Iterator[GradFrame[Any]]) -> None:
    from rich.live import Live
    from rich.text import Text

    frames: deque[Mapping[str, Any]] = deque(maxlen=SPARK_FRAMES)
    with Live(auto_refresh=False, transient=False) as live:
        for frame in found:
            frames.append(frame.document())
            live.update(Text("\n".join(table_of(frames, live.console.width))), refresh=True)


class Tensors(CommandPart):
    """Parameters, and numbers of parameters and gradients."""

    name = "tensors"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, params, "", "'layers.*.weight' -o name", "'*' --buffers")
        commands.add(
            LOOK,
            stats,
            "",
            "'layers.*' 'norm>10'",
            "'layers.0.*' -o json",
            "head.weight --histogram",
        )
        commands.add(
            LOOK,
            grads,
            "'*'",
            "'layers.*' --every-steps 10 -o jsonl",
            "head.weight --histogram -n 1",
        )
