"""`paramd updates`, `check`, `spectrum`, `diff`, `why`, `logs`: what is wrong with a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from paramd import state_files
from paramd.cli import completion, ended
from paramd.cli.options import AnyGlobs, Target, completed, with_output
from paramd.cli.output import Column, count, number
from paramd.cli.parts import LOOK, CommandPart, Commands
from paramd.cli.shell import one_line, say
from paramd.errors import UsageError
from paramd.extras import need

if TYPE_CHECKING:
    from paramd.mesh.insight.reports import RankActivity, RankLog, Why
    from paramd.mesh.insight.spectrum import Spectrum
    from paramd.mesh.mesh import Mesh

UPDATE_COLUMNS = (
    Column("name", "NAME"),
    Column("step", "STEP", right=True, if_many=True),
    Column("norm", "NORM", number, right=True),
    Column("weight_norm", "WEIGHT", number, right=True, drop=1),
    Column("ratio", "RATIO", number, right=True),
    Column("rms", "RMS", number, right=True, drop=2),
    Column("max_abs", "MAX", number, right=True, drop=3),
    Column("changed", "CHANGED", count, right=True, drop=4),
    Column("numel", "ELEMENTS", count, right=True, drop=5),
    Column("moment_rms", "V RMS", number, right=True, drop=2),
    Column("effective_lr", "EFFECTIVE LR", number, right=True, drop=1),
    Column("nonfinite", "NAN/INF", count, right=True, drop=6),
)


@with_output
def updates(
    target: Target,
    glob: AnyGlobs = None,
    steps: Annotated[int, Option("--steps", min=1, help="Combined effect of N updates.")] = 1,
) -> None:
    """Show what the next update does: its norm, and its ratio to the weight.

    The sidecars compute it from snapshots of two steps; training continues. A
    rising ratio, or a rising effective learning rate, often precedes a jump of
    the loss.
    """
    with target.connect() as mesh:
        found = mesh.updates(*(glob or ()), steps=steps)
    target.show(
        "updates",
        [asdict(row) for row in found],
        UPDATE_COLUMNS,
        job=found.job,
        incarnation=found.incarnation,
        moments_missing=found.moments_missing,
    )
    say(found.summary())
    if found.moments_missing:
        say(f"no second moments: {found.moments_missing}")


CHECK_COLUMNS = (
    Column("name", "NAME"),
    Column("key", "STATE"),
    Column("numel", "ELEMENTS", count, right=True, drop=2),
    Column("differing", "DIFFERING", count, right=True),
    Column("element", "FIRST", right=True, drop=1),
    Column("bits", "BITS", lambda bits: ", ".join(map(str, bits))),
    Column("refused", "SKIPPED BECAUSE"),
)


@with_output
def verify(
    target: Target,
    glob: AnyGlobs = None,
    rank: Annotated[int, Option("--rank", min=0, help="Rank to verify.")] = 0,
    count_: Annotated[int, Option("-n", "--count", min=1, help="Number of updates to verify.")] = 1,
) -> None:
    """Recompute the next update of a rank, and compare the results bit by bit.

    The rank's sidecar recomputes the update from gradients, parameters and
    optimizer state, with torch's own Adam, AdamW or SGD. Exits with code 1 if
    anything differs.
    """
    rows, wrong = [], False
    with target.connect() as mesh:
        for _ in range(count_):
            found = mesh.verify(*(glob or ()), rank=rank)
            rows += [{"step": found.step, **asdict(row)} for row in found]
            wrong = wrong or not found.clean
            say(found.summary())
    about: dict[str, Any] = {"job": found.job, "incarnation": found.incarnation, "rank": rank}
    target.show("tensors", rows, CHECK_COLUMNS, **about)
    if wrong:
        raise typer.Exit(1)


SPECTRUM_COLUMNS = (
    Column("number", "NUMBER", right=True),
    Column("value", "SINGULAR VALUE", number, right=True),
    Column("share", "OF THE SQUARED NORM", lambda value: f"{100 * value:.2f} %", right=True),
)


@with_output
def spectrum(
    target: Target,
    name: Annotated[str, completed("NAME", "A weight.", completion.names)],
    k: Annotated[int, Option("-k", min=1, max=32, help="How many singular values.")] = 8,
) -> None:
    """Show the largest singular values of a weight, and its dead and equal rows.

    The sidecars multiply their shards with narrow random matrices; the weight
    itself is not sent.
    """
    need("paramd spectrum", "torch")
    with target.connect() as mesh:
        found = mesh.spectrum(name, k)
    squares = found.norm**2
    rows = [
        {"number": number, "value": value, "share": value**2 / squares if squares else 0.0}
        for number, value in enumerate(found.singular_values)
    ]
    target.show("values", rows, SPECTRUM_COLUMNS, **asdict(found))
    for line in (found.summary(), *_remarks(found)):
        say(line)


def _remarks(found: Spectrum) -> list[str]:
    """Unusual properties of a weight."""
    from paramd.mesh.insight.spectrum import listed

    lines = []
    if found.dead_row_count:
        lines.append(f"dead rows: {listed(found.dead_rows, found.dead_row_count)}")
    if found.dead_column_count:
        lines.append(f"dead columns: {listed(found.dead_columns, found.dead_column_count)}")
    if found.duplicate_row_count:
        groups = "; ".join(" = ".join(map(str, rows[:4])) for rows in found.duplicate_rows[:4])
        lines.append(f"rows equal to an earlier one: {found.duplicate_row_count:,} ({groups})")
    for share, what in ((found.saturated, "saturated"), (found.denormal, "denormal")):
        if share:
            lines.append(f"{what} elements: {100 * share:.3g} %")
    return lines


DIFF_COLUMNS = (
    Column("name", "NAME"),
    Column("norm", "NORM", number, right=True),
    Column("relative", "RELATIVE", number, right=True),
    Column("cosine", "COSINE", number, right=True, drop=1),
    Column("changed", "CHANGED", count, right=True),
    Column("numel", "ELEMENTS", count, right=True, drop=3),
    Column("largest_rows", "LARGEST ROWS", lambda v: ", ".join(str(row) for row, _ in v), drop=2),
    Column("problem", "PROBLEM"),
)


@with_output
def diff(
    target: Target,
    a: Annotated[
        str,
        Argument(
            metavar="A",
            help="'now', '+N' (N steps from now), a step to come, mark:NAME, "
            "job:NAME, or a safetensors file or directory.",
        ),
    ],
    b: Annotated[str, Argument(metavar="B", help="The same.")] = "now",
    only: Annotated[
        list[str] | None, Option("--filter", metavar="GLOB", help="Compare these names.")
    ] = None,
) -> None:
    """Show how the weights of B differ from those of A, tensor by tensor.

    Norm and cosine of the difference, changed elements, and the rows that differ
    most; the largest relative difference comes first.
    """
    with ExitStack() as stack:
        mesh = stack.enter_context(target.connect())
        one, other = (_source(stack, target, text) for text in (a, b))
        found = mesh.diff(one, other, *(only or ()))
    target.show("tensors", [asdict(row) for row in found], DIFF_COLUMNS, a=found.a, b=found.b)
    say(found.summary())


def _source(stack: ExitStack, target: Target, text: str) -> str | int | Mesh:
    if text.startswith("job:"):
        return stack.enter_context(target.named(text.removeprefix("job:")).connect())
    if text.startswith("+") and not text[1:].isdecimal():
        raise UsageError(f"{text[:40]!r}: expected +N, the steps from now")
    return int(text) if text.isdecimal() else text


def _age(value: Any) -> str:
    return f"{value:.1f} s" if value is not None else "-"


def _bytes(value: Any) -> str:
    return f"{value / 2**30:.2f} GiB" if value is not None else "-"


WHY_COLUMNS = (
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


@with_output
def why(
    target: Target,
    rank: Annotated[
        list[int] | None,
        Option("--rank", min=0, help="Show this rank's stacks, collectives and output."),
    ] = None,
    lines: Annotated[
        int, Option("--lines", min=0, max=100, help="Last lines of output to show.")
    ] = 10,
) -> None:
    """Show why training is stuck: what each rank is doing, and a verdict.

    Works while training hangs, and neither stops nor slows it. Stacks come
    from the trainers, through their sidecars, without ptrace.
    """
    with target.connect() as mesh:
        found = mesh.why(*(rank or ()), log_lines=lines)
    is_table = target.format.is_table
    if is_table:
        print(f"{one_line(found.verdict)}\n")
    rows = [{**one.document, "doing": one.error or one.doing} for one in found]
    about = {name: getattr(found, name) for name in found.about}
    target.show("ranks", rows, WHY_COLUMNS, id_key="rank", **about)
    if is_table:
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


LINES_OF_ONE = 100
LINES_OF_EACH = 20

LOG_COLUMNS = (
    Column("source", "SOURCE"),
    Column("lines", "LINES", lambda lines: str(len(lines)), right=True),
)


@with_output
def logs(
    target: Target,
    rank: Annotated[
        int | None,
        Argument(
            metavar="[RANK]",
            min=0,
            help="Rank to show; all unless given.",
            autocompletion=completion.ranks,
        ),
    ] = None,
    lines: Annotated[
        int | None,
        Option(
            "-n",
            "--lines",
            min=1,
            max=state_files.MAX_LOG_LINES,
            help="Lines from the end of each log; 100 of one rank, 20 of each of all.",
        ),
    ] = None,
) -> None:
    """Show the last lines of a rank's sidecar, and of its trainer; without RANK, of all ranks.

    The trainer's lines are available if its output goes to a file (torchrun
    --log-dir DIR --redirects 3), also after it has died, until its sidecar
    exits. For a job that has ended, the sidecar's log is read from this host's
    state dir. Needs an editor's or an admin's token.
    """
    past = ended.find(target)
    if past is not None:
        past.say()
        ranks = range(past.last.world_size) if rank is None else (rank,)
        found = [_left(past, one, _count(lines, rank)) for one in ranks]
    else:
        with target.connect() as mesh:
            ranks = range(mesh.world_size) if rank is None else (rank,)
            found = [mesh.logs(one, lines=_count(lines, rank)) for one in ranks]
    if target.format.is_table:
        for line in chain.from_iterable(one.text() for one in found):
            print(one_line(line))
    elif rank is not None:
        about = asdict(found[0])
        target.show("logs", about.pop("logs"), LOG_COLUMNS, id_key="source", **about)
    else:
        rows = [
            {"rank": one.rank, "error": one.error, **asdict(log)}
            for one in found
            for log in one.logs
        ]
        about = {"job": found[0].job, "incarnation": found[0].incarnation} if found else {}
        target.show("logs", rows, LOG_COLUMNS, id_key="source", **about)


def _count(lines: int | None, rank: int | None) -> int:
    """Lines to show of each log: fewer where all ranks are shown."""
    if lines is not None:
        return lines
    return LINES_OF_ONE if rank is not None else LINES_OF_EACH


def _left(past: ended.Past, rank: int, lines: int) -> RankLog:
    """The logs that an ended job's sidecars have left here."""
    from paramd.mesh.insight.reports import LogTail, RankLog

    found = state_files.lines_of_log(past.job, rank, lines)
    missing = "" if found else "nothing has been written to it"
    tail = LogTail(source="sidecar", lines=tuple(found), missing=missing)
    return RankLog(
        job=past.job, incarnation=past.last.incarnation, rank=rank, error="", logs=(tail,)
    )


class Activity(CommandPart):
    """What the ranks do."""

    name = "activity"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, why, "", "--rank 3", "-o json")
        commands.add(LOOK, logs, "3", "3 -n 20 --job my-run", "0 -o json")


class Weights(CommandPart):
    """What changes in the weights."""

    name = "weights"

    def add_to(self, commands: Commands) -> None:
        commands.add(LOOK, updates, "", "'layers.*' -o json")
        commands.add(
            LOOK, spectrum, "layers.0.up.weight", "'layers.0.up.weight[0:512]' -k 16 -o json"
        )
        commands.add(LOOK, verify, "", "'layers.*' --rank 3", "-n 100")
        commands.add(
            LOOK,
            diff,
            "checkpoints/step-1000",
            "checkpoints/step-1000 checkpoints/step-2000",
            "+0 +100 --filter 'layers.*'",
            "job:other now -o json",
        )
