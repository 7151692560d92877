"""Exports in the format of torch.distributed.checkpoint: each rank writes what it holds. Pure.

A tensor is cut into chunks, each a box; a flat interval (FSDP1) becomes several boxes. Names
are those that `dcp.load({"model": ..., "optim": ...})` expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paramd.layout.dtypes import item_bytes
from paramd.layout.exports.files import (
    Entry,
    ExportFile,
    Format,
    Frame,
    Planned,
    TorchFiles,
    scalar_bytes,
    state_positions,
)
from paramd.layout.exports.optimizer import OptimizerTable
from paramd.layout.exports.sources import HolderChoice
from paramd.layout.exports.torch_archive import torch_archive
from paramd.layout.plan import Landing, blocks
from paramd.layout.types import Box, Piece, TensorLayout, boxes_of_interval, full_box, row_major

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan
    from paramd.layout.exports.settings import ExportSettings

MAX_CHUNK_BYTES = 32 << 20
"""Most bytes of data in one chunk."""

MODEL_KEY = "model"
OPTIMIZER_KEY = "optim"


@dataclass(frozen=True, slots=True)
class _Archived(Entry):
    """A chunk in an archive of its own, like that of torch.save."""

    @property
    def frame(self) -> Frame:
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
    ) -> None:
        begin = self._ends.get(rank, 0)
        entry = _Archived(name, *source, box, dtype, begin, constant)
        self.entries.setdefault(rank, []).append(entry)
        self._ends[rank] = begin + entry.size_bytes


def rank_files(
    tensors: Sequence[TensorLayout],
    names: Mapping[str, str],
    settings: ExportSettings,
    _world_size: int,
    optimizer: OptimizerTable | None,
) -> Planned:
    """One file for each rank that writes something."""
    writing = _Writing()
    pieces: dict[str, Sequence[Piece]] = {}
    choice = HolderChoice()
    for number, tensor in enumerate(tensors):
        chosen = pieces[tensor.fqn] = choice.pieces(tensor, None)
        name = f"{MODEL_KEY}.{names[tensor.fqn]}"
        dtype = settings.dtype_of(tensor.dtype)
        _append(writing, tensor, name, chosen, ("", number), dtype)
    if optimizer is not None:
        _append_states(writing, tensors, names, pieces, optimizer)
    files = [
        ExportFile(f"__{rank}_0.distcp", rank, b"", tuple(writing.entries[rank]))
        for rank in sorted(writing.entries)
    ]
    return files, pieces


def _append(
    writing: _Writing,
    tensor: TensorLayout,
    name: str,
    chosen: Sequence[Piece],
    source: tuple[str, int],
    dtype: str,
) -> None:
    if not chosen:
        writing.append(0, name, source, full_box(tensor.shape), dtype)
        return
    for piece in chosen:
        for box in chunk_boxes(piece, tensor.shape, dtype):
            writing.append(piece.rank, name, source, box, dtype)


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
                chosen = pieces[tensor.fqn]
                _append(writing, tensor, f"{head}.{key}", chosen, source, dtype)
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
    """Split a box, in row-major order, into boxes of at most `max_bytes` each.

    Each is contiguous in the box's own row-major bytes.
    """
    strides = row_major(box.sizes)
    whole = Landing(
        tensor=0,
        begin_bytes=0,
        sizes=box.sizes,
        strides=strides,
        target=box,
        size_bytes=box.numel * item_bytes,
        direct=False,
    )
    for block in blocks(whole, item_bytes, max_bytes):
        yield block.target


def _finish(plan: ExportPlan, torch_files: TorchFiles) -> dict[str, bytes]:
    return torch_files(_description(plan))


def _description(plan: ExportPlan) -> dict[str, Any]:
    """Chunks by key, key paths, and objects, as dcp_writer reads them."""
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
    for alias, fqn in plan.tied.items():
        kept = tensors[f"{MODEL_KEY}.{plan.names[fqn]}"]
        name = plan.names[alias]
        tensors[f"{MODEL_KEY}.{name}"] = {**kept, "path": [MODEL_KEY, name]}
    objects_file = f"__{plan.layout.world_size}_0.distcp"
    return {"tensors": tensors, "objects": _objects(plan), "objects_file": objects_file}


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
    """Settings of parameter groups, flattened to one key each, as torch does."""
    if plan.optimizer is None:
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
    finish=_finish,
    keeps_tied=True,
)
