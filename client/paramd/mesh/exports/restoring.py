"""Tensors of a finished export, to restore: read through the control plane, and verified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from xxhash import xxh3_128_hexdigest

from paramd.errors import DataLossError, NotFoundError, ParamdError, UsageError
from paramd.layout.exports.safetensors import MODEL_FILES, SAFETENSORS, SUFFIX
from paramd.layout.types import Layout, TensorKind
from paramd.mesh.peers.control import RestClient

if TYPE_CHECKING:
    import torch

MANIFEST: Final = "paramd-export.json"

Moved = Callable[[int, int], object]
"""Called with bytes done and total bytes."""


class ExportFiles:
    """Files of a finished export, read through the control plane and verified."""

    def __init__(self, rest: RestClient, job: str, destination: str) -> None:
        self._rest = rest
        self._path = f"/jobs/{quote(job, safe='')}/export-file"
        self._destination = destination

    async def manifest(self) -> Mapping[str, Any]:
        """The export's manifest.

        Raises:
            NotFoundError: there is no export. ParamdError: its manifest is unreadable.
        """
        try:
            found = json.loads(await self.read(MANIFEST))
            if not isinstance(found, dict) or found["paramd_export"] != 1:
                raise ValueError("another version of the manifest")
        except (ValueError, KeyError, RecursionError) as error:
            raise ParamdError(
                f"{self._destination}: its {MANIFEST} cannot be read ({error})"
            ) from error
        return found

    async def read(self, name: str, moved: Callable[[int], object] = lambda size: None) -> bytes:
        """Read a whole file; `moved` gets the size of each part. Raises ParamdError."""
        data = bytearray()
        while True:
            asked = urlencode(
                {"destination": self._destination, "name": name, "offset_bytes": len(data)}
            )
            size_bytes, part = await self._rest.read_bytes(f"{self._path}?{asked}")
            data += part
            moved(len(part))
            if len(data) >= size_bytes:
                return bytes(data)
            if not part:
                raise DataLossError(f"{self._destination}: {name} ended too early; try again")

    async def tensors(self, manifest: Mapping[str, Any], moved: Moved) -> dict[str, torch.Tensor]:
        """All parameters and buffers, by their names in the files.

        Raises:
            UsageError: it is not a safetensors export.
            DataLossError: a file does not match the manifest's checksum.
        """
        if manifest["format"] != SAFETENSORS.name:
            raise UsageError(
                f"{self._destination} is of format {manifest['format']!r}; only safetensors can be "
                "restored into a running mesh"
            )
        named = ((str(one["name"]), one) for one in manifest["files"])
        files = [
            one for name, one in named if name.startswith(MODEL_FILES) and name.endswith(SUFFIX)
        ]
        whole_bytes = sum(int(one["size_bytes"]) for one in files)
        done_bytes = 0

        def more(size_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += size_bytes
            moved(done_bytes, whole_bytes)

        found: dict[str, torch.Tensor] = {}
        for one in files:
            data = await self.read(str(one["name"]), more)
            if xxh3_128_hexdigest(data) != one["xxh3"]:
                raise DataLossError(
                    f"{self._destination}: {one['name']} is not what was exported; its checksum "
                    "differs from the manifest's"
                )
            name = f"{self._destination}: {one['name']}"
            found |= await asyncio.to_thread(loaded, data, name)
        return found

    async def values(self, layout: Layout, moved: Moved) -> tuple[dict[str, torch.Tensor], str]:
        """The value of every parameter of a layout, and a note that names their source.

        Raises: as `tensors` and `values_of`.
        """
        manifest = await self.manifest()
        tensors = await self.tensors(manifest, moved)
        said = f"restored {self._destination}, step {manifest['step']} of {manifest['job']}"
        return values_of(layout, tensors, manifest["renamed"]), said


def loaded(data: bytes, name: str) -> dict[str, torch.Tensor]:
    """Parse a safetensors file. Raises DataLossError."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except SafetensorError as error:
        raise DataLossError(f"{name} cannot be read as safetensors: {error}") from error


def values_of(
    layout: Layout, tensors: Mapping[str, torch.Tensor], renamed: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The value of every parameter of a layout.

    Args:
        tensors: by their names in the files.
        renamed: from names in the model to names in the files, where they differ.

    Raises:
        NotFoundError: a parameter is missing. UsageError: a shape differs.
    """
    found: dict[str, torch.Tensor] = {}
    for one in layout.tensors:
        if one.kind is TensorKind.BUFFER or not one.numel:
            continue
        names = [renamed.get(name, name) for name in (one.fqn, *one.aliases)]
        value = next((tensors[name] for name in names if name in tensors), None)
        if value is None:
            raise NotFoundError(
                f"the export has no {names[0]!r}; it is of another model, or of part of one"
            )
        if tuple(value.shape) != one.shape:
            raise UsageError(
                f"{one.fqn}: the export has shape {tuple(value.shape)}, the mesh {one.shape}"
            )
        found[one.fqn] = value
    return found
