"""A short-lived process in which torch writes the metadata of a checkpoint.

Reads a description from standard input (see dcp.py), builds torch's metadata from it, has torch's
`FileSystemWriter.finish` write it, and prints the files.
"""

import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
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

_Path = tuple[str | int, ...]


def main() -> None:
    told = json.load(sys.stdin)
    objects = [(tuple(one["path"]), _restored(one["value"])) for one in told["objects"]]
    flat, places = flatten_state_dict(told["extra"])
    objects += [(places[name], value) for name, value in flat.items()]
    results, data = _objects(objects, told["objects_file"])
    tensors: dict[str, Any] = {}
    paths: dict[str, _Path] = {}
    for name, facts in told["tensors"].items():
        tensors[name] = _tensor(facts)
        paths[name] = tuple(facts["path"])
        results += _chunks(name, facts)
    for path, _ in objects:
        tensors[_key(path)] = BytesStorageMetadata()
        paths[_key(path)] = path
    files = {told["objects_file"]: data} if objects else {}
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


def _objects(items: list[tuple[_Path, Any]], file: str) -> tuple[list[WriteResult], bytes]:
    """Non-tensor state: the objects' records, and their bytes end to end."""
    data = io.BytesIO()
    results = []
    for path, value in items:
        begin = data.tell()
        content = io.BytesIO()
        torch.save(value, content)
        data.write(content.getbuffer())
        length = data.tell() - begin
        info = _StorageInfo(file, begin, length)
        results.append(WriteResult(MetadataIndex(_key(path)), length, info))
    return results, data.getvalue()


def _key(path: _Path) -> str:
    return ".".join(map(str, path))


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
