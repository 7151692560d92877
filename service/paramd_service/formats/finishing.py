"""The manifest of an export."""

from __future__ import annotations

from collections.abc import Iterable

from paramd.layout.exports.files import json_bytes
from paramd.layout.exports.plan import ExportPlan
from paramd.v1 import export_pb2
from paramd.version import __version__
from paramd_service.destinations.place import Target


def manifest(
    plan: ExportPlan,
    message: export_pb2.ExportPlan,
    target: Target,
    files: Iterable[export_pb2.ExportedFile],
    *,
    job: str,
    created_s: float,
) -> bytes:
    """The manifest: what this is, of which state, and every file with size and checksum."""
    settings = plan.settings
    document = {
        "paramd_export": 1,
        "export_id": target.export_id,
        "job": job,
        "epoch": message.epoch,
        "step": message.step,
        "edits": message.edits,
        "unsettled": message.unsettled,
        "layout_digest": message.layout_digest,
        "format": settings.format,
        "dtype": settings.dtype,
        "created_s": created_s,
        "version": __version__,
        "tied": plan.tied,
        "renamed": {old: new for old, new in plan.names.items() if old != new},
        "tensor_bytes": sum(entry.data_bytes for file in plan.files for entry in file.entries),
        "files": [
            {"name": file.name, "size_bytes": file.size_bytes, "xxh3": file.xxh3.hex()}
            for file in files
        ],
    }
    return json_bytes(document)
