"""`paramd summon`: full parameters of one step into a safetensors file."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paramd.cli.options import Buffers, Target, with_target
from paramd.cli.output import seconds, size
from paramd.cli.shell import say
from paramd.errors import ConflictError, UsageError

if TYPE_CHECKING:
    import torch

    from paramd.mesh.mesh import Mesh
    from paramd.mesh.results import Summoned
    from paramd.safetensors_file import SafetensorsWriter

Moved = Callable[[str, int, int], None]
"""(what is done, bytes done, bytes in all)"""

CHUNK_BYTES = 16 << 20

SUFFIX = ".safetensors"


@contextmanager
def bar(what: str) -> Iterator[Moved]:
    """Shows what it is told; nothing where stderr is no terminal."""
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

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None)

        def moved(now: str, done_bytes: int, size_bytes: int) -> None:
            shown.update(
                task,
                description=now,
                completed=done_bytes,
                total=size_bytes if size_bytes else None,
            )

        yield moved


def save(found: Summoned, path: Path, *, replace: bool) -> int:
    """Writes what was summoned; returns the size of the file in bytes.

    The metadata have the names that `safetensors.torch.load_model` knows for tied
    tensors: alias to the name that was written.
    """
    # Not for `--help`: it would take a fifth longer.
    from paramd.safetensors_file import SafetensorsWriter, TensorSpec

    kept, aliases = untie(found)
    specs = [
        TensorSpec(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape))
        for name, tensor in kept.items()
    ]
    metadata = {
        **aliases,
        "format": "pt",
        "paramd_job": found.job,
        "paramd_incarnation": str(found.incarnation),
        "paramd_step": str(found.step),
    }
    with SafetensorsWriter(path, specs, metadata=metadata, replace=replace) as writer:
        for spec in writer.specs:
            _append(writer, kept[spec.name])
    return writer.size_bytes


def untie(found: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor under its first name, and the other names with that first one."""
    first: dict[int, str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in found.items():
        canonical = first.setdefault(id(tensor), name)
        if canonical == name:
            kept[name] = tensor
        else:
            aliases[name] = canonical
    return kept, aliases


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype without torch's prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def _append(writer: SafetensorsWriter, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return
    # The bytes of any dtype, numpy's or not. `tensor` keeps them alive.
    memory = memoryview((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())).cast("B")
    for begin in range(0, size_bytes, CHUNK_BYTES):
        writer.append(memory[begin : begin + CHUNK_BYTES])


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
    say job, incarnation and step. A tied parameter is written once, its other names
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
    from paramd.mesh.results import UNSETTLED_TEXT

    say(
        f"{path}: {found.name_count:,} names, {size(found.size_bytes)} of job {found.job}, "
        "incarnation "
        f"{found.incarnation}, step {found.step}{UNSETTLED_TEXT if found.unsettled else ''}, "
        "read in "
        f"{seconds(found.seconds)}"
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
    from paramd.mesh.reading.assemble import torch_dtype

    return torch_dtype(dtype.removeprefix("torch.")) if dtype is not None else None
