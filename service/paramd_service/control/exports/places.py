"""Where exports go, and what is read of those that stand there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from paramd.errors import NotFoundError
from paramd.v1 import export_pb2
from paramd_service.control.exports.crew import Crew
from paramd_service.exports.destinations import Destination, DestinationKind, locate
from paramd_service.exports.place import MANIFEST

NOBODYS = "0" * 32
"""Id of no export: with it nothing can be written over or removed."""


def target_of(
    destinations: Mapping[str, Destination],
    text: str,
    *,
    export_id: str = NOBODYS,
    overwrite: bool = False,
) -> export_pb2.ExportTarget:
    """What sidecars are told of "name/key". Raises UsageError, NotFoundError."""
    found, key = locate(destinations, text)
    return export_pb2.ExportTarget(
        destination=found.name,
        root=found.root,
        options=found.options,
        key=key,
        export_id=export_id,
        overwrite=overwrite,
    )


async def read_file(
    crew: Crew, target: export_pb2.ExportTarget, name: str, offset_bytes: int
) -> tuple[int, bytes]:
    """(size of a file, up to 8 MiB of it) of what stands at a key; the manifest or a file of it.

    Raises:
        NotFoundError: no export stands there, or it has no such file.
    """
    read = partial(crew.calls.read, target=target)
    if name != MANIFEST:
        _, (_, text) = await crew.any(partial(read, name=MANIFEST, offset_bytes=0))
        # What lies there beside an export is nobody's business.
        if name not in {str(file["name"]) for file in json.loads(text)["files"]}:
            raise NotFoundError(
                f"{target.destination}/{target.key}: its manifest has no file {name[:80]!r}"
            )
    _, answer = await crew.any(partial(read, name=name, offset_bytes=offset_bytes))
    return answer


def kind_of(destination: Destination) -> str:
    """What stands behind a name, in a word."""
    return "s3" if destination.kind is DestinationKind.S3 else "directory"
