"""A process that reads an export and uploads its parameters as an edit's operands, then ends.

It is an ordinary client of the sidecars, with the caller's ticket; `control.base.processes` says
how it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_hexdigest

from paramd import bounds
from paramd.answers import parsed_json, read_file
from paramd.errors import ConflictError, DataLossError, NotFoundError
from paramd.layout.edits.ops import EditTerms, ops_of
from paramd.layout.exports.safetensors import MODEL_FILES, SUFFIX
from paramd.layout.types import Layout
from paramd.memory.left import check_client
from paramd.mesh.edits.editing import Sending, upload
from paramd.mesh.edits.lending import Lender
from paramd.mesh.exports.calls import MANIFEST, joined_parts, loaded, values_of
from paramd.mesh.peers.control import parse_job
from paramd.mesh.peers.discovery import SidecarFinder
from paramd.mesh.peers.sidecars import Sidecars
from paramd.mesh.reading.transfer import Transfer
from paramd_service.control.base.processes import GivenDirectory, answers
from paramd_service.destinations.directory import export_of

if TYPE_CHECKING:
    import torch


async def load(asked: Mapping[str, Any]) -> dict[str, Any]:
    """As `Loading.upload`."""
    directory = GivenDirectory({asked["job"]: parse_job(asked["document"])})
    finder, transfer = SidecarFinder(directory, asked["job"]), Transfer()

    async def read_layout(sidecars: Sidecars) -> Layout:
        return (await finder.index(sidecars)).layout

    deadline_s = time.monotonic() + asked["timeout_s"]
    folder, edit = Path(asked["path"]), asked["edit"]
    try:
        await finder.start()
        await transfer.load_torch()
        layout = await finder.attempts(read_layout, deadline_s)
        check_place(folder, asked)
        values = await transfer.run(lambda: read_values(folder, asked["label"], layout))
        # Once more: another export may have taken the place while files were read.
        check_place(folder, asked)
        terms = EditTerms(reset_moments=edit["reset_moments"], note=edit["note"])
        sending = Sending(lender=Lender(), deadline_s=deadline_s)
        await upload(finder, transfer, edit["id"], ops_of((), set=values), terms, sending)
    finally:
        await finder.close()
        transfer.close()
    return {}


def check_place(folder: Path, asked: Mapping[str, Any]) -> None:
    """Raise ConflictError if another export, perhaps of another job, lies there by now."""
    if export_of(folder).export_id != asked["export"]:
        raise ConflictError(f"{asked['label']} was replaced or removed; choose another")


def read_values(folder: Path, label: str, layout: Layout) -> dict[str, torch.Tensor]:
    """The value of every parameter of the layout. Blocks.

    Raises:
        DataLossError: If a file differs from the manifest.
        NotFoundError: If a parameter is missing.
        UsageError: If a shape differs.
        ExhaustedError: Without memory for all of it.
    """
    try:
        manifest = parsed_json(read_file(folder / MANIFEST, bounds.MANIFEST), bounds.MANIFEST)
        files = [
            (str(one["name"]), int(one["size_bytes"]), str(one["xxh3"]))
            for one in manifest["files"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataLossError(f"{label}: its {MANIFEST} cannot be read ({error!r})") from None
    files = [one for one in files if one[0].startswith(MODEL_FILES) and one[0].endswith(SUFFIX)]
    # Before anything is taken. A file is there as bytes, and as tensors.
    sizes = [size_bytes for _, size_bytes, _ in files]
    check_client(sum(sizes) + max(sizes, default=0))
    tensors: dict[str, torch.Tensor] = {}
    for name, size_bytes, xxh3 in files:
        if "/" in name:
            raise DataLossError(f"{label}: its {MANIFEST} names a file {name[:80]!r}")
        try:
            data = read_file(folder / name, bounds.Bound(what=name, most_bytes=size_bytes))
        except OSError as error:
            raise NotFoundError(f"{label}: {name} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DataLossError(f"{label}: {error}") from None
        if xxh3_128_hexdigest(data) != xxh3:
            raise DataLossError(f"{label}: {name} is not what was exported; its checksum differs")
        tensors |= loaded(data, f"{label}: {name}")
    whole = joined_parts(layout, tensors, manifest.get("parts", {}))
    return values_of(layout, whole, manifest["renamed"])


if __name__ == "__main__":
    answers(load)
