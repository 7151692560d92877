"""What an export has beside its tensors: index, torch's metadata, and the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from paramd.layout.exports.plan import ExportPlan, tied_names
from paramd.layout.exports.safetensors import MODEL_FILES, OPTIMIZER_FILES, ExportFile
from paramd.layout.exports.settings import ExportFormat
from paramd.v1 import export_pb2
from paramd.version import __version__
from paramd_service.destinations.place import Target
from paramd_service.formats.dcp import dcp_files

OPTIMIZER_GROUPS = "optimizer.json"
"""Settings of the optimizer's parameter groups, beside its state."""


def format_files(plan: ExportPlan) -> dict[str, bytes]:
    """What the format has beside the files that sidecars wrote; blocks.

    Raises:
        ParamdError: torch could not write its metadata.
    """
    if plan.settings.format is ExportFormat.DCP:
        return dcp_files(plan)
    found = _indexes(plan.files)
    if plan.optimizer is not None:
        groups = {"groups": [dict(group) for group in plan.optimizer.groups]}
        found[OPTIMIZER_GROUPS] = _json(groups)
    return found


def _indexes(files: Iterable[ExportFile]) -> dict[str, bytes]:
    """The index of each kind of file that has several."""
    found = {}
    for base in (MODEL_FILES, OPTIMIZER_FILES):
        shards = [file for file in files if file.name.startswith(f"{base}-")]
        if shards:
            entries = [(entry, shard.name) for shard in shards for entry in shard.entries]
            weights = {entry.name: name for entry, name in entries}
            total = sum(entry.data_bytes for entry, _ in entries)
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(weights.items())),
            }
            found[f"{base}.safetensors.index.json"] = _json(index)
    return found


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
        "format": settings.format.value,
        "dtype": settings.dtype,
        "created_s": created_s,
        "version": __version__,
        "tied": tied_names(plan),
        "renamed": {old: new for old, new in plan.names.items() if old != new},
        "tensor_bytes": sum(entry.data_bytes for file in plan.files for entry in file.entries),
        "files": [
            {"name": file.name, "size_bytes": file.size_bytes, "xxh3": file.xxh3.hex()}
            for file in files
        ],
    }
    return _json(document)


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
