"""`paramd summon`: write full parameters of one step to a safetensors file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Option

from paramd.cli.options import Buffers, Dtype, Globs, Replica, Target, duration, with_target
from paramd.cli.output import seconds, size
from paramd.cli.shell import say
from paramd.errors import UsageError

if TYPE_CHECKING:
    import torch

    from paramd.mesh.mesh import Mesh
    from paramd.mesh.reading.stream import Transport

Moved = Callable[[str, int, int], None]
"""(activity, bytes done, total bytes)"""

SUFFIX = ".safetensors"


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
            shown.update(
                task,
                description=now,
                completed=done_bytes,
                total=size_bytes if size_bytes else None,
                visible=True,
            )

        yield moved


@with_target
def summon(
    target: Target,
    glob: Globs,
    output_file: Annotated[
        Path, Option("-f", "--file", metavar="FILE.safetensors", help="File to write.")
    ],
    dtype: Dtype = None,
    buffers: Buffers = False,
    replica: Replica = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing file.")] = False,
    transport: Annotated[
        str,
        Option("--transport", metavar="auto|same-host|stream|grpc",
               help="Transport to use."),
    ] = "auto",
    timeout: Annotated[
        float | None,
        Option("--timeout", metavar="S", parser=duration,
               help="Give up after S; by default never."),
    ] = None,
) -> None:  # fmt: skip
    """Write full parameters, all of one step, to a safetensors file.

    Training continues meanwhile. The file appears once complete; its metadata
    name job, run and step. A tied parameter is written once, with its
    other names in the metadata. If interrupted, the same command resumes.
    """
    check_destination(output_file, overwrite=overwrite)
    with target.connect() as mesh:
        fetch(
            mesh,
            output_file,
            *glob,
            dtype=dtype,
            buffers=buffers,
            replica=replica,
            overwrite=overwrite,
            transport=cast("Transport", transport),
            timeout=timeout,
        )


def fetch(
    mesh: Mesh,
    path: Path,
    *patterns: str,
    dtype: str | None,
    buffers: bool,
    overwrite: bool,
    replica: int | None = None,
    name_map: Mapping[str, str] | None = None,
    transport: Transport = "auto",
    timeout: float | None = None,
) -> None:
    """Download to a file, with a progress bar. Raises as `Mesh.download`."""
    try:
        with bar(path.name) as moved:
            found = mesh.download(
                path,
                *patterns,
                dtype=load_torch(dtype),
                buffers=buffers,
                replica=replica,
                overwrite=overwrite,
                name_map=name_map,
                transport=transport,
                timeout=timeout,
                progress=lambda done_bytes, size_bytes: moved(path.name, done_bytes, size_bytes),
                on_message=say,
            )
    except KeyboardInterrupt:
        from paramd.mesh.exports.download import is_resumable

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
    from paramd.mesh.results import UNSETTLED_TEXT, differ_text

    say(
        f"{path}: {found.name_count:,} names, {size(found.size_bytes)} of job {found.job}, "
        f"run {found.incarnation}, step {found.step}"
        f"{UNSETTLED_TEXT if found.unsettled else ''}"
        f"{differ_text(found.replicas_differ)}, read in {seconds(found.seconds)}"
    )


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Fail before connecting. Raises as `PartialFile.check`, UsageError for a wrong suffix."""
    from paramd.mesh.exports.download import PartialFile

    if path.suffix != SUFFIX:
        raise UsageError(f"--file: {path} does not end in {SUFFIX}")
    PartialFile(path).check(overwrite=overwrite)


def load_torch(dtype: str | None) -> torch.dtype | None:
    """The dtype of that name. Loads torch, so that the time of the download excludes it."""
    from paramd.mesh.reading.assemble import dtype_of

    return dtype_of(dtype) if dtype is not None else None
