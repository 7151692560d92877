"""`paramd summon`: full parameters of one step into a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paramd.cli.options import Buffers, Target, with_target
from paramd.cli.output import seconds, size
from paramd.cli.progress import bar
from paramd.cli.shell import say
from paramd.errors import ConflictError, UsageError

if TYPE_CHECKING:
    import torch

    from paramd.mesh.mesh import Mesh

SUFFIX = ".safetensors"


@with_target
def summon(
    target: Target,
    glob: Annotated[
        list[str],
        typer.Argument(metavar="GLOB", help="Which names, or slices such as 'w[0:4]'."),
    ],
    output_file: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE.safetensors", help="Where to write them."),
    ],
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="Cast, for example to bfloat16.")
    ] = None,
    buffers: Buffers = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Write full parameters, all of one step, into a safetensors file.

    Training goes on meanwhile. The file appears when it is whole; its metadata
    say job, epoch and step. A tied parameter is written once, its other names
    are metadata. After a break the same command goes on where it was.
    """
    check_destination(output_file, force=force)
    with target.connect() as mesh:
        fetch(mesh, output_file, *glob, dtype=dtype, buffers=buffers, force=force)


def fetch(
    mesh: Mesh,
    path: Path,
    *patterns: str,
    dtype: str | None,
    buffers: bool,
    force: bool,
    name_map: Mapping[str, str] | None = None,
) -> None:
    """Downloads into a file, with a bar of its bytes. Raises as `Mesh.download`."""
    with bar(path.name) as moved:
        found = mesh.download(
            path,
            *patterns,
            dtype=_load_torch(dtype),
            buffers=buffers,
            replace=force,
            name_map=name_map,
            moved=lambda done_bytes, size_bytes: moved(path.name, done_bytes, size_bytes),
            said=say,
        )
    say(
        f"{path}: {found.name_count:,} names, {size(found.size_bytes)} of job {found.job}, epoch "
        f"{found.epoch}, step {found.step}, read in {seconds(found.seconds)}"
    )


def check_destination(path: Path, *, force: bool) -> None:
    """Refuses early what writing would refuse after all the reading.

    Raises:
        UsageError: not a name for such a file, or no such directory.
        ConflictError: the file exists and may not be replaced.
    """
    if path.suffix != SUFFIX:
        raise UsageError(f"--output: {path} does not end in {SUFFIX}")
    if not path.parent.is_dir():
        raise UsageError(f"--output: there is no directory {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"--output: {path} is a directory")
    if path.exists() and not force:
        raise ConflictError(f"{path} exists; give another name, or --force to replace it")


def _load_torch(dtype: str | None) -> torch.dtype | None:
    """The dtype of that name. Loads torch, which shall not count as time of reading."""
    from paramd.mesh.assemble import torch_dtype

    return torch_dtype(dtype.removeprefix("torch.")) if dtype is not None else None
