"""`paramd stats`: statistics of full tensors, computed in place by the sidecars."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli.options import Buffers, Globs, Output, Target, with_target
from paramd.cli.output import Column, Listing, count, emit, number, seconds
from paramd.cli.shell import one_line, say
from paramd.layout.stats import STATISTICS

if TYPE_CHECKING:
    from paramd.mesh.results import StatsTable, TensorStats

WIDTH = 40
"""Characters of the longest bar."""

_EIGHTHS = " ▏▎▍▌▋▊▉"

NUMBERS = tuple(
    Column(
        one.name,
        one.title.upper(),
        count if one.kind is int else number,
        right=True,
        # Norm, NaN and Inf stay: they tell whether something is wrong.
        drop={"zero_count": 5, "mean": 4, "std": 3, "min": 2, "max": 1}.get(one.name, 0),
    )
    for one in STATISTICS
)
COLUMNS = (
    Column("name", "NAME"),
    Column("count", "COUNT", count, right=True, drop=6),
    *NUMBERS,
)


def histogram(exponents: Sequence[tuple[int, int]], *, zero_count: int = 0) -> list[str]:
    """One line per bin: lower bound, bar, count.

    Args:
        exponents: (e, count) of 2**e <= |x| < 2**(e+1), ascending.
        zero_count: elements that are exactly zero; they get a line of their own.
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
    eighths = max(1, round(8 * WIDTH * value / most))
    whole, left = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[left] if left else "")


@with_target
def stats(
    target: Target,
    glob: Globs,
    with_histogram: Annotated[
        bool, typer.Option("--histogram", help="Count elements by power of 2.")
    ] = False,
    buffers: Buffers = False,
    unsettled: Annotated[
        bool,
        typer.Option(
            "--unsettled", help="Accept weights that changed since the last update, as they are."
        ),
    ] = False,
    output: Output = None,
) -> None:
    """Show statistics of full tensors, all at one step.

    Computed in place by the sidecars. Each element counts once, however many
    ranks hold it. Norm, mean, std, min and max cover the finite elements; NAN
    and INF count the others. The last line is the total.
    """
    began_s = time.monotonic()
    with target.connect() as mesh:
        asked_s = time.monotonic()
        found = mesh.stats(*glob, buffers=buffers, histogram=with_histogram, unsettled=unsettled)
    from paramd.mesh.results import unsettled_text

    age_s = time.monotonic() - asked_s
    form = target.format
    emit(listing(found, age_s=age_s, with_histogram=with_histogram), form)
    if with_histogram and form.is_table:
        print_histograms(found)
    rests = unsettled_text(unsettled=found.unsettled, label=found.label)
    say(
        f"job {found.job}, incarnation {found.incarnation}, step {found.step}"
        f"{rests}, at most {seconds(age_s)} old "
        f"({seconds(time.monotonic() - began_s)} total)"
    )


def listing(found: StatsTable, *, age_s: float, with_histogram: bool) -> Listing:
    """One row per tensor. `age_s` is an upper bound: the time since the request."""
    return Listing(
        name="stats",
        rows=[_row(row, with_histogram) for row in found],
        columns=COLUMNS,
        about={
            "job": found.job,
            "incarnation": found.incarnation,
            "step": found.step,
            "unsettled": found.unsettled,
            "label": found.label,
            "age_s": age_s,
        },
        total={**_numbers(found.total, with_histogram), "name": "total"},
    )


def print_histograms(found: StatsTable) -> None:
    """Print a histogram of binary exponents for each tensor to stdout."""
    for row in found:
        summary = row.summary
        print(f"\n{one_line(row.name)}: elements x by the power of 2 at or below |x|")
        for line in histogram(summary.exponents, zero_count=summary.zero_count):
            print(line, file=sys.stdout)


def _row(row: TensorStats, with_histogram: bool) -> dict[str, Any]:
    shown = {"name": row.name, "shape": list(row.shape), "dtype": row.dtype}
    return {**shown, **_numbers(row, with_histogram)}


def _numbers(row: TensorStats, with_histogram: bool) -> dict[str, Any]:
    found: dict[str, Any] = row.summary.numbers()
    if with_histogram:
        found["exponents"] = [list(bin_) for bin_ in row.summary.exponents]
    return found
