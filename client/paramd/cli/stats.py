"""`paramd stats`: statistics of full tensors, computed where they lie."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli.histogram import histogram
from paramd.cli.options import Buffers, Format, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, number, seconds
from paramd.cli.shell import one_line, say

if TYPE_CHECKING:
    from paramd.mesh.results import StatsTable, TensorStats

COLUMNS = (
    Column("fqn", "NAME"),
    Column("count", "COUNT", count, right=True),
    Column("norm", "NORM", number, right=True),
    Column("mean", "MEAN", number, right=True),
    Column("std", "STD", number, right=True),
    Column("min", "MIN", number, right=True),
    Column("max", "MAX", number, right=True),
    Column("zero_count", "ZEROS", count, right=True),
    Column("nan_count", "NAN", count, right=True),
    Column("inf_count", "INF", count, right=True),
)


@with_target
def stats(
    target: Target,
    glob: Annotated[
        list[str],
        typer.Argument(metavar="GLOB", help="Which names, or slices such as 'w[0:4]'."),
    ],
    with_histogram: Annotated[
        bool, typer.Option("--histogram", help="How many elements lie between powers of 2.")
    ] = False,
    buffers: Buffers = False,
    output: Output = None,
) -> None:
    """Show statistics of full tensors, all at one step.

    Computed where the data lies. Each element counts once, however many ranks
    hold it. Norm, mean, std, min and max are over the finite elements; NAN and
    INF count the others. The last line is the total.
    """
    began_s = time.monotonic()
    with target.connect() as mesh:
        asked_s = time.monotonic()
        found = mesh.stats(*glob, buffers=buffers, histogram=with_histogram)
    age_s = time.monotonic() - asked_s
    form = target.format
    emit(listing(found, age_s=age_s, with_histogram=with_histogram), form)
    if with_histogram and form is Format.TABLE:
        print_histograms(found)
    say(
        f"job {found.job}, epoch {found.epoch}, step {found.step}, at most {seconds(age_s)} old "
        f"({seconds(time.monotonic() - began_s)} in all)"
    )


def listing(found: StatsTable, *, age_s: float, with_histogram: bool) -> Listing:
    """The answer as rows. `age_s` is an upper bound: the time since the question was put."""
    return Listing(
        name="stats",
        rows=[_row(row, with_histogram) for row in found],
        columns=COLUMNS,
        about={"job": found.job, "epoch": found.epoch, "step": found.step, "age_s": age_s},
        total={**_numbers(found.total, with_histogram), "fqn": "total"},
    )


def print_histograms(found: StatsTable) -> None:
    """A histogram of binary exponents for each tensor, to stdout."""
    for row in found:
        summary = row.summary
        print(f"\n{one_line(row.name)}: elements x by the power of 2 below |x|")
        for line in histogram(summary.exponents, zero_count=summary.zero_count):
            print(line, file=sys.stdout)


def _row(row: TensorStats, with_histogram: bool) -> dict[str, Any]:
    shown = {"fqn": row.name, "shape": list(row.shape), "dtype": row.dtype}
    return {**shown, **_numbers(row, with_histogram)}


def _numbers(row: TensorStats, with_histogram: bool) -> dict[str, Any]:
    summary = row.summary
    found: dict[str, Any] = {
        "count": summary.count,
        "norm": summary.norm,
        "mean": summary.mean,
        "std": summary.std,
        "min": summary.min,
        "max": summary.max,
        "zero_count": summary.zero_count,
        "nan_count": summary.nan_count,
        "inf_count": summary.inf_count,
    }
    if with_histogram:
        found["exponents"] = [list(bin_) for bin_ in summary.exponents]
    return found
