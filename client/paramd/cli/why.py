"""`paramd why`: which rank keeps the others waiting, and what it is doing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paramd.cli.options import Output, Target, with_target
from paramd.cli.output import Column, Listing, emit
from paramd.cli.shell import one_line

if TYPE_CHECKING:
    from paramd.mesh.insight.reports import RankActivity, Why


def _age(value: Any) -> str:
    return f"{value:.1f} s" if value is not None else "-"


def _bytes(value: Any) -> str:
    return f"{value / 2**30:.2f} GiB" if value is not None else "-"


COLUMNS = (
    Column("rank", "RANK", right=True),
    Column("step", "STEP", right=True),
    Column("phase", "PHASE", drop=2),
    Column("boundary_age_s", "BOUNDARY", _age, right=True),
    Column("doing", "DOING"),
    Column("seen_for_s", "SEEN FOR", _age, right=True, drop=1),
    Column("where", "WHERE"),
    Column("rss_bytes", "MEMORY", _bytes, right=True, drop=3),
    Column("open_file_count", "FILES", right=True, drop=4),
)


@with_target
def why(
    target: Target,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", min=0, help="Show this rank's stacks, collectives and output."),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", min=0, max=100, help="Last lines of output to show.")
    ] = 10,
    output: Output = None,
) -> None:
    """Show why training is stuck: what each rank is doing, and a verdict.

    Works while training hangs, and neither stops nor slows it. Stacks come
    from the trainers, through their sidecars, without ptrace.
    """
    with target.connect() as mesh:
        found = mesh.why(*(rank or ()), log_lines=lines)
    rows = [{**one.document, "doing": one.error or one.doing} for one in found]
    about = {"job": found.job, "incarnation": found.incarnation, "verdict": found.verdict}
    listing = Listing(name="ranks", rows=rows, columns=COLUMNS, about=about, id_key="rank")
    if not target.format.is_table:
        emit(listing, target.format)
        return
    print(one_line(found.verdict))
    print()
    emit(listing, target.format)
    for line in _details(found, named=bool(rank)):
        print(one_line(line))


def _details(found: Why, *, named: bool) -> Iterator[str]:
    """The stacks of ranks that were named, else of those that are overdue."""
    for one in found:
        if named or one.overdue or one.missing:
            yield ""
            yield f"rank {one.rank}:"
            yield from (f"  {line}" for line in _rank_lines(one, named=named))


def _rank_lines(one: RankActivity, *, named: bool) -> Iterator[str]:
    if one.missing:
        yield f"no stacks: {one.missing}"
    for thread in one.threads:
        if thread.training or named:
            yield f"thread {thread.name} ({one.source})"
            yield from (f"  {frame}" for frame in thread.frames)
    for made in one.collectives:
        if named or not made.done:
            state = "over" if made.done else "open"
            yield f"{made.name} #{made.sequence} of {made.group}, {state}, {made.age_s:.1f} s ago"
    if named and one.collectives_missing:
        yield f"no collectives: {one.collectives_missing}"
    yield from (f"| {line}" for line in one.log_lines)
    if named and one.log_missing:
        yield f"no output: {one.log_missing}"
