"""A short-lived process in which torch writes the metadata of a checkpoint.

Reads a description from standard input (see dcp.py), builds torch's metadata from it, has torch's
`FileSystemWriter.finish` write it, and prints the files.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

METADATA_FILE = ".metadata"


def main() -> None:
    told = json.load(sys.stdin)
    results, data = _objects(told["objects"], told["objects_file"])
    tensors: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, facts in told["tensors"].items():
        tensors[name] = _tensor(facts)
        paths[name] = tuple(facts["path"])
        results += _chunks(name, facts)
    for one in told["objects"]:
        name = _key(one)
        tensors[name] = BytesStorageMetadata()
        paths[name] = tuple(one["path"])
    files = {told["objects_file"]: data} if told["objects"] else {}
    files[METADATA_FILE] = _written(Metadata(tensors, planner_data=paths), results)
    sizes = [[name, len(content)] for name, content in files.items()]
    sys.stdout.buffer.write(json.dumps(sizes).encode() + b"\n" + b"".join(files.values()))


def _tensor(facts: dict[str, Any]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk["begin"]), torch.Size(chunk["sizes"]))
        for chunk in facts["chunks"]
    ]
    properties = TensorProperties(dtype=getattr(torch, facts["dtype"]))
    return TensorStorageMetadata(properties, torch.Size(facts["shape"]), chunks)


def _chunks(name: str, facts: dict[str, Any]) -> list[WriteResult]:
    return [
        WriteResult(
            index=MetadataIndex(name, chunk["begin"], number),
            size_in_bytes=chunk["length"],
            storage_data=_StorageInfo(chunk["file"], chunk["offset"], chunk["length"]),
        )
        for number, chunk in enumerate(facts["chunks"])
    ]


def _objects(items: list[dict[str, Any]], file: str) -> tuple[list[WriteResult], bytes]:
    """Non-tensor state: the objects' records, and their bytes end to end."""
    data = io.BytesIO()
    results = []
    for one in items:
        begin = data.tell()
        content = io.BytesIO()
        torch.save(_restored(one["value"]), content)
        data.write(content.getbuffer())
        length = data.tell() - begin
        info = _StorageInfo(file, begin, length)
        results.append(WriteResult(MetadataIndex(_key(one)), length, info))
    return results, data.getvalue()


def _key(one: dict[str, Any]) -> str:
    return ".".join(map(str, one["path"]))


def _restored(value: Any) -> Any:
    """Undo what JSON did to a value: settings such as `betas` are tuples."""
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        return tuple(value)
    return value


def _written(metadata: Metadata, results: list[WriteResult]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder, sync_files=False)
        writer.set_up_storage_writer(True)
        writer.finish(metadata, [results])
        return Path(folder, METADATA_FILE).read_bytes()


if __name__ == "__main__":
    main()
