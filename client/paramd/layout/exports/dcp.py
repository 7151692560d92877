"""Exports in the format of torch.distributed.checkpoint: each rank writes its own elements. Pure.

A tensor is cut into chunks, each a box; a flat interval (FSDP1) becomes several boxes. Names
are those that `dcp.load({"model": ..., "optim": ...})` expects.

Each chunk is a file for `torch.load(weights_only=True)`: a zip archive of stored records, with a
short pickle (opcodes that only call torch's own rebuild function), the byte order, a version, and
the data. We emit those few opcodes ourselves, so nothing here can pickle an object, and torch is
not needed.

    archive = TorchArchive("float32", (2, 3))
    archive.before + data + archive.after(crc32(data))

Source: pytorch/pytorch: torch/serialization.py, caffe2/serialize/inline_container.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any
from zlib import crc32

from paramd.errors import UsageError
from paramd.layout.dtypes import DTYPES, item_bytes
from paramd.layout.exports.files import (
    Blend,
    Entry,
    ExportFile,
    Format,
    Reads,
    number_bytes,
    scalar_bytes,
    state_positions,
)
from paramd.layout.exports.optimizer import OptimizerTable
from paramd.layout.plan import Landing, blocks
from paramd.layout.types import Box, Piece, TensorLayout, boxes_of_interval, full_box, row_major

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan
    from paramd.layout.exports.settings import ExportSettings

_ALIGNMENT_BYTES = 64
_STREAMED = 0x0808  # sizes and checksum come after the data; names are UTF-8
_STORED = 0x0800
# Pad bytes stand for fields that are 0.
_LOCAL = struct.Struct("<4sHH4xHIIIHH")
_CENTRAL = struct.Struct("<4s4xH4xHIIIH12xI")
_DESCRIPTOR = struct.Struct("<4sIII")
_END = struct.Struct("<4sHHHHIIH")
_DATE = 0x21  # 1980-01-01: the bytes must not depend on the time

MAX_CHUNK_BYTES = 32 << 20
"""Most bytes of data in one chunk."""

MODEL_KEY = "model"
OPTIMIZER_KEY = "optim"


@dataclass(frozen=True, slots=True)
class _Record:
    name: bytes
    flags: int
    checksum: int
    size_bytes: int
    begin_bytes: int

    def central(self, checksum: int) -> bytes:
        size, begin = self.size_bytes, self.begin_bytes
        return (
            _CENTRAL.pack(
                b"PK\x01\x02", self.flags, _DATE, checksum, size, size, len(self.name), begin
            )
            + self.name
        )


class TorchArchive:
    """One dense row-major tensor. `before`, the data, and `after` make up the file."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.data_bytes = prod(shape) * item_bytes(dtype)
        if self.data_bytes >= 1 << 31:
            raise UsageError(f"{self.data_bytes:,} bytes are too many for one archive; cut it")
        self._records: list[_Record] = []
        before = bytearray()
        self._append(before, b"archive/data.pkl", _pickle(dtype, shape))
        self._append(before, b"archive/version", b"3\n")
        self._append(before, b"archive/byteorder", b"little")
        name = b"archive/data/0"
        begin = len(before)
        size = -(begin + _LOCAL.size + len(name) + 4) % _ALIGNMENT_BYTES
        # An extra field that aligns the data behind it.
        extra = b"FB" + size.to_bytes(2, "little") + b"Z" * size
        before += _local(name, _STREAMED, 0, 0, len(extra)) + name + extra
        self._records.append(_Record(name, _STREAMED, 0, self.data_bytes, begin))
        self.before = bytes(before)

    @property
    def size_bytes(self) -> int:
        central = sum(_CENTRAL.size + len(record.name) for record in self._records)
        return len(self.before) + self.data_bytes + _DESCRIPTOR.size + central + _END.size

    def after(self, checksum: int) -> bytes:
        """The bytes after the data; `checksum` is the data's zlib.crc32."""
        size = self.data_bytes
        descriptor = _DESCRIPTOR.pack(b"PK\x07\x08", checksum, size, size)
        *small, data = self._records
        central = b"".join(record.central(record.checksum) for record in small)
        central += data.central(checksum)
        count = len(self._records)
        begin = len(self.before) + size + len(descriptor)
        end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(central), begin, 0)
        return descriptor + central + end

    def _append(self, before: bytearray, name: bytes, content: bytes) -> None:
        checksum = crc32(content)
        self._records.append(_Record(name, _STORED, checksum, len(content), len(before)))
        before += _local(name, _STORED, checksum, len(content), 0) + name + content


@lru_cache(maxsize=1024)
def torch_archive(dtype: str, shape: tuple[int, ...]) -> TorchArchive:
    """The archive of a tensor, cached: the layers of a model are alike."""
    return TorchArchive(dtype, shape)


def _local(name: bytes, flags: int, checksum: int, size_bytes: int, extra_bytes: int) -> bytes:
    return _LOCAL.pack(
        b"PK\x03\x04", 20, flags, _DATE, checksum, size_bytes, size_bytes, len(name), extra_bytes
    )


def _pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Opcodes: rebuild a tensor of this shape on record "0"."""
    storage = DTYPES[dtype].storage
    typed = bool(storage)
    parts = [
        b"\x80\x02",
        _global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"),
        b"((",
        _text("storage"),
        _global("torch", storage) if storage else _global("torch.storage", "UntypedStorage"),
        _text("0"),
        _text("cpu"),
        _number(prod(shape) if typed else prod(shape) * item_bytes(dtype)),
        b"tQ",
        _number(0),
        _tuple(shape),
        _tuple(row_major(shape)),
        b"\x89",
        _global("collections", "OrderedDict"),
        b")R",
        b"" if typed else _global("torch", dtype),
        b"tR.",
    ]
    return b"".join(parts)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(value: int) -> bytes:
    if value < 256:
        return b"K" + bytes([value])
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x09" + value.to_bytes(9, "little")


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(_number(value) for value in values) + b"t" if values else b")"


@dataclass(frozen=True, slots=True)
class _Archived(Entry):
    """A chunk in a separate archive, like that of torch.save."""

    @property
    def frame(self) -> TorchArchive:
        return torch_archive(self.dtype, self.box.sizes)


class _Writing:
    """Entries by rank, laid out one after the other."""

    def __init__(self) -> None:
        self.entries: dict[int, list[Entry]] = {}
        self._ends: dict[int, int] = {}

    def append(
        self,
        rank: int,
        name: str,
        source: tuple[str, int],
        box: Box,
        dtype: str,
        constant: bytes | None = None,
        blend: Blend | None = None,
    ) -> None:
        begin = self._ends.get(rank, 0)
        entry = _Archived(name, *source, box, dtype, begin, constant, blend)
        self.entries.setdefault(rank, []).append(entry)
        self._ends[rank] = begin + entry.size_bytes


def rank_files(
    tensors: Sequence[TensorLayout],
    names: Mapping[str, str],
    settings: ExportSettings,
    reads: Reads,
    optimizer: OptimizerTable | None,
) -> list[ExportFile]:
    """One file for each rank that writes something."""
    writing = _Writing()
    _append_model(writing, tensors, names, settings, reads, optimizer)
    for fqn, constant in reads.constants.items():
        name, whole = f"{MODEL_KEY}.{names[fqn]}", full_box(constant.layout.shape)
        writing.append(0, name, ("", -1), whole, constant.layout.dtype, constant.data)
    if optimizer is not None and reads.averages is None:
        _append_states(writing, tensors, names, reads.states, optimizer)
    return [
        ExportFile(f"__{rank}_0.distcp", rank, b"", tuple(writing.entries[rank]))
        for rank in sorted(writing.entries)
    ]


def _append_model(
    writing: _Writing,
    tensors: Sequence[TensorLayout],
    names: Mapping[str, str],
    settings: ExportSettings,
    reads: Reads,
    optimizer: OptimizerTable | None,
) -> None:
    """The model's parameters and buffers, or what an optimizer keeps instead of them."""
    states = state_positions(tensors, optimizer) if optimizer is not None else {}
    for number, tensor in enumerate(tensors):
        name = f"{MODEL_KEY}.{names[tensor.fqn]}"
        source = key, _ = reads.source(tensor.fqn, number, states)
        if key and optimizer is not None:
            chosen, dtype = reads.states[tensor.fqn], optimizer.states[key][tensor.fqn]
        else:
            chosen, dtype = reads.model[tensor.fqn], tensor.dtype
        if reads.averages is not None and tensor.fqn in reads.averages.values:
            data = number_bytes(reads.averages.values[tensor.fqn], dtype, tensor.fqn)
            writing.append(0, name, ("", -1), Box((), ()), dtype, data)
            continue
        blend = reads.blends.get(tensor.fqn)
        _append(writing, tensor, name, chosen, source, settings.dtype_of(dtype), blend)


def _append(
    writing: _Writing,
    tensor: TensorLayout,
    name: str,
    chosen: Sequence[Piece],
    source: tuple[str, int],
    dtype: str,
    blend: Blend | None = None,
) -> None:
    if not chosen:
        writing.append(0, name, source, full_box(tensor.shape), dtype)
        return
    for piece in chosen:
        for box in chunk_boxes(piece, tensor.shape, dtype):
            writing.append(piece.rank, name, source, box, dtype, blend=blend)


def _append_states(
    writing: _Writing,
    tensors: Sequence[TensorLayout],
    names: Mapping[str, str],
    pieces: Mapping[str, Sequence[Piece]],
    optimizer: OptimizerTable,
) -> None:
    positions = state_positions(tensors, optimizer)
    for tensor in tensors:
        head = f"{OPTIMIZER_KEY}.state.{names[tensor.fqn]}"
        for key in optimizer.keys:
            dtype = optimizer.states[key].get(tensor.fqn)
            if dtype is not None:
                source = (key, positions[key, tensor.fqn])
                _append(writing, tensor, f"{head}.{key}", pieces[tensor.fqn], source, dtype)
        for scalar in optimizer.scalars.get(tensor.fqn, ()):
            name, data = f"{head}.{scalar.key}", scalar_bytes(scalar)
            writing.append(0, name, (scalar.key, -1), Box((), ()), scalar.dtype, data)


def chunk_boxes(piece: Piece, shape: tuple[int, ...], dtype: str) -> Iterator[Box]:
    """Split a piece into boxes of at most `MAX_CHUNK_BYTES` each."""
    region = piece.region
    boxes = [region] if isinstance(region, Box) else boxes_of_interval(region, shape)
    for box in boxes:
        yield from cut_box(box, item_bytes(dtype), MAX_CHUNK_BYTES)


def cut_box(box: Box, item_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Split a box, in row-major order, into contiguous boxes of at most `max_bytes`."""
    whole = Landing(
        begin_bytes=0,
        sizes=box.sizes,
        strides=row_major(box.sizes),
        target=box,
        size_bytes=box.numel * item_bytes,
    )
    for block in blocks(whole, item_bytes, max_bytes):
        yield block.target


def _description(plan: ExportPlan) -> dict[str, Any]:
    """Chunks by key, key paths, and objects, as dcp_writer reads them."""
    tensors: dict[str, dict[str, Any]] = {}
    for file in plan.files:
        for entry in file.entries:
            tensors.setdefault(entry.name, _facts(plan, entry))["chunks"].append(
                {
                    "begin": entry.box.begin,
                    "sizes": entry.box.sizes,
                    "file": file.name,
                    "offset": entry.begin_bytes,
                    "length": entry.size_bytes,
                }
            )
    for alias, fqn in plan.tied.items():
        kept = tensors[f"{MODEL_KEY}.{plan.names[fqn]}"]
        name = plan.names[alias]
        tensors[f"{MODEL_KEY}.{name}"] = {**kept, "path": [MODEL_KEY, name]}
    objects_file = f"__{plan.layout.world_size}_0.distcp"
    values = plan.extra.values if plan.extra is not None else {}
    return {
        "tensors": tensors,
        "objects": _objects(plan),
        "extra": {MODEL_KEY: {plan.names[name]: value for name, value in values.items()}},
        "objects_file": objects_file,
    }


def _facts(plan: ExportPlan, entry: Entry) -> dict[str, Any]:
    shape = entry.box.sizes
    if entry.tensor >= 0:
        shape = plan.sources[entry.state_key].tensors[entry.tensor].shape
    if entry.name.startswith(f"{MODEL_KEY}."):
        path = [MODEL_KEY, entry.name.removeprefix(f"{MODEL_KEY}.")]
    else:
        head, tail = f"{OPTIMIZER_KEY}.state.", f".{entry.state_key}"
        name = entry.name.removeprefix(head).removesuffix(tail)
        path = [OPTIMIZER_KEY, "state", name, entry.state_key]
    return {"dtype": entry.dtype, "shape": shape, "path": path, "chunks": []}


def _objects(plan: ExportPlan) -> list[dict[str, Any]]:
    """Settings of parameter groups, flattened to one key each, as torch does."""
    if plan.optimizer is None or not plan.with_optimizer:
        return []
    return [
        {"path": [OPTIMIZER_KEY, "param_groups", number, name], "value": value}
        for number, group in enumerate(plan.optimizer.groups)
        for name, value in group.items()
    ]


DCP = Format(
    name="dcp",
    number=2,
    endings=(".distcp", ".metadata"),
    plan=rank_files,
    finish=lambda plan, torch_files: torch_files(_description(plan)),
    keeps_tied=True,
)
