"""`.metadata` of torch.distributed.checkpoint, written by torch itself in a process of its own.

A sidecar loads no torch for this: importing it would keep the sidecar from serving for
seconds, and stay in its memory. What the process is told is text; what it gives back are
the files' bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from paramd.errors import ParamdError
from paramd.layout.exports.dcp import MODEL_KEY, OPTIMIZER_KEY
from paramd.layout.exports.plan import ExportPlan, tied_names
from paramd.layout.exports.safetensors import Entry

METADATA_FILE = ".metadata"

_TIMEOUT_S = 300.0


def dcp_files(plan: ExportPlan) -> dict[str, bytes]:
    """The files that torch writes, the metadata last; blocks for seconds.

    Raises:
        ParamdError: torch could not.
    """
    told = json.dumps(_description(plan)).encode()
    command = [sys.executable, "-m", "paramd_service.formats.dcp_writer"]
    try:
        done = subprocess.run(
            command, check=False, input=told, capture_output=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ParamdError(f"torch did not write its metadata within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ParamdError(f"torch could not write its metadata: {''.join(last)[:300]}")
    return _unpacked(done.stdout)


def objects_file(plan: ExportPlan) -> str:
    """Name of the file that holds what is no tensor."""
    return f"__{plan.layout.world_size}_0.distcp"


def _description(plan: ExportPlan) -> dict[str, Any]:
    """Chunks by key, paths of keys, and objects, as dcp_writer reads them."""
    tensors: dict[str, dict[str, Any]] = {}
    for file in plan.files:
        for entry in file.entries:
            facts = tensors.setdefault(entry.name, _facts(plan, entry))
            facts["chunks"].append(
                {
                    "begin": entry.box.begin,
                    "sizes": entry.box.sizes,
                    "file": file.name,
                    "offset": entry.begin_bytes,
                    "length": entry.size_bytes,
                }
            )
    for alias, fqn in _aliases(plan):
        kept = tensors[f"{MODEL_KEY}.{plan.names[fqn]}"]
        name = plan.names[alias]
        tensors[f"{MODEL_KEY}.{name}"] = {**kept, "path": [MODEL_KEY, name]}
    return {"tensors": tensors, "objects": _objects(plan), "objects_file": objects_file(plan)}


def _aliases(plan: ExportPlan) -> list[tuple[str, str]]:
    return list(tied_names(plan).items())


def _facts(plan: ExportPlan, entry: Entry) -> dict[str, Any]:
    shape: tuple[int, ...] = ()
    if entry.tensor >= 0:
        shape = plan.sources[entry.state_key].tensors[entry.tensor].shape
    if not entry.state_key:
        path = [MODEL_KEY, entry.name.removeprefix(f"{MODEL_KEY}.")]
    else:
        head, tail = f"{OPTIMIZER_KEY}.state.", f".{entry.state_key}"
        name = entry.name.removeprefix(head).removesuffix(tail)
        path = [OPTIMIZER_KEY, "state", name, entry.state_key]
    return {"dtype": entry.dtype, "shape": shape, "path": path, "chunks": []}


def _objects(plan: ExportPlan) -> list[dict[str, Any]]:
    """Settings of parameter groups, each under its own key, as torch flattens them."""
    if plan.optimizer is None:
        return []
    return [
        {"path": [OPTIMIZER_KEY, "param_groups", number, name], "value": value}
        for number, group in enumerate(plan.optimizer.groups)
        for name, value in group.items()
    ]


def _unpacked(output: bytes) -> dict[str, bytes]:
    """Files in the form: one line of JSON [[name, size], ...], then their bytes."""
    head, _, data = output.partition(b"\n")
    found = {}
    begin = 0
    for name, size in json.loads(head):
        found[str(name)] = data[begin : begin + size]
        begin += size
    return found
