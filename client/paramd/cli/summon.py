"""`paramd summon`: write full parameters of one step to a safetensors file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Option

from paramd.cli.options import (
    Adapter,
    Buffers,
    Dtype,
    Globs,
    Merge,
    Replica,
    Target,
    duration,
    with_target,
)
from paramd.cli.output import seconds, size
from paramd.cli.parts import LOOK, CommandPart, Commands
from paramd.cli.shell import say
from paramd.errors import UsageError

if TYPE_CHECKING:
    from paramd.mesh.reading.stream import Transport

Moved = Callable[[str, int, int], None]
"""(activity, bytes done, total bytes)"""


@contextmanager
def bar(what: str, *, hidden: bool = False) -> Iterator[Moved]:
    """A progress bar on stderr if that is a terminal. `hidden` until something moves."""
    if not sys.stderr.isatty():
        yield lambda _what, _done_bytes, _size_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as shown:
        task = shown.add_task(what, total=None, visible=not hidden)

        def moved(now: str, done_bytes: int, size_bytes: int) -> None:
            total = size_bytes or None
            shown.update(task, description=now, completed=done_bytes, total=total, visible=True)

        yield moved


@with_target
def summon(
    target: Target,
    glob: Globs,
    path: Annotated[
        Path, Option("-f", "--file", metavar="FILE.safetensors", help="File to write.")
    ],
    dtype: Dtype = None,
    buffers: Buffers = False,
    replica: Replica = None,
    merge: Merge = False,
    adapter: Adapter = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing file.")] = False,
    transport: Annotated[
        str,
        Option("--transport", metavar="auto|same-host|stream|grpc", help="Transport to use."),
    ] = "auto",
    timeout: Annotated[
        float | None,
        Option(
            "--timeout", metavar="S", parser=duration, help="Give up after S; by default never."
        ),
    ] = None,
) -> None:
    """Write full parameters, all of one step, to a safetensors file.

    Training continues meanwhile. The file appears once complete; its metadata
    name job, run and step. A tied parameter is written once, with its
    other names in the metadata. If interrupted, the same command resumes.
    """
    from paramd.mesh.exports.download import PartialFile, is_resumable
    from paramd.mesh.results import UNSETTLED_TEXT, differ_text

    if path.suffix != ".safetensors":
        raise UsageError(f"--file: {path} does not end in .safetensors")
    # Before connecting.
    PartialFile(path).check(overwrite=overwrite)
    try:
        with target.connect() as mesh, bar(path.name) as moved:
            found = mesh.download(
                path,
                *glob,
                dtype=dtype,
                buffers=buffers,
                replica=replica,
                merge=merge,
                adapter=adapter,
                overwrite=overwrite,
                transport=cast("Transport", transport),
                timeout=timeout,
                progress=lambda done_bytes, size_bytes: moved(path.name, done_bytes, size_bytes),
                on_message=say,
            )
    except KeyboardInterrupt:
        if path.exists() and not is_resumable(path):
            say(f"interrupted; {path} is complete")
        elif is_resumable(path):
            say(
                f"interrupted; {path} is not there yet, but what has arrived is kept: the same "
                "command resumes at the same step for 2 minutes, later it starts over"
            )
        else:
            say("interrupted before anything arrived; nothing was written")
        raise
    say(
        f"{path}: {found.name_count:,} names, {size(found.size_bytes)} of job {found.job}, "
        f"run {found.incarnation}, step {found.step}"
        f"{UNSETTLED_TEXT if found.unsettled else ''}"
        f"{differ_text(found.replicas_differ)}, read in {seconds(found.seconds)}"
    )


class Summon(CommandPart):
    """Reads parameters."""

    name = "summon"

    def add_to(self, commands: Commands) -> None:
        commands.add(
            LOOK,
            summon,
            "'*' -f model.safetensors",
            "'layers.0.*' --dtype bfloat16 -f layer0.safetensors --overwrite",
            "'head.weight[0:4]' -f rows.safetensors",
        )
