"""Exports as safetensors: how tensors are sharded, and which rank writes which shard. Pure.

Source of the format: huggingface/safetensors, its README and `serialize_to_file`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from paramd import bounds
from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes, safetensors_name
from paramd.layout.exports.files import (
    Blend,
    Entry,
    ExportFile,
    Format,
    Reads,
    TorchFiles,
    json_bytes,
    number_bytes,
    piece_bytes,
    scalar_bytes,
    state_positions,
)
from paramd.layout.exports.optimizer import OptimizerTable
from paramd.layout.types import Box, Piece, TensorKind, TensorLayout, full_box

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan
    from paramd.layout.exports.settings import ExportSettings

MAX_HEADER_BYTES = bounds.HEADER.most_bytes
"""Readers refuse longer headers."""

METADATA_KEY = "__metadata__"
_ALIGNMENT_BYTES = 8

METADATA = {"format": "pt"}
"""Metadata that readers expect in a header."""

MODEL_FILES = "model"
OPTIMIZER_FILES = "optimizer"
SUFFIX = ".safetensors"
INDEX = ".index.json"

OPTIMIZER_GROUPS = "optimizer.json"
"""Settings of the optimizer's parameter groups."""

EXTRA_STATE = "extra_state.json"
"""Extra state that is no tensor, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor in the header; `dtype` is torch's name without its prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Wide elements first, as the reference writer does, so that every tensor is aligned."""
    return sorted(specs, key=lambda spec: -item_bytes(spec.dtype))


def encode_header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str], *, size_bytes: int = 0
) -> bytes:
    """The length and the JSON header, padded so that the data starts aligned.

    `size_bytes`: padded to at least this size, a multiple of 8.

    Raises:
        UsageError: For a duplicate or reserved name, an unsupported dtype, or a header too
            long.
    """
    twice = [name for name, times in Counter(s.name for s in specs).items() if times > 1]
    if twice or any(spec.name == METADATA_KEY for spec in specs):
        raise UsageError(f"tensor name {(twice or [METADATA_KEY])[0]!r} is a duplicate or reserved")
    header: dict[str, object] = {METADATA_KEY: dict(metadata)}
    begin = 0
    for spec in specs:
        end = begin + spec.size_bytes
        header[spec.name] = {
            "dtype": safetensors_name(spec.dtype),
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(size_bytes - 8)
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the header of {len(specs):,} tensors takes {len(text):,} bytes; readers accept "
            f"{MAX_HEADER_BYTES:,}; write fewer tensors to one file"
        )
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to write, before it is placed in a file."""

    spec: TensorSpec
    layout: TensorLayout
    state_key: str
    tensor: int
    constant: bytes | None = None
    box: Box | None = None
    """The part of the tensor; None: all of it."""
    blend: Blend | None = None

    @property
    def size_bytes(self) -> int:
        return self.spec.size_bytes


def shard_files(
    tensors: Sequence[TensorLayout],
    names: Mapping[str, str],
    settings: ExportSettings,
    reads: Reads,
    optimizer: OptimizerTable | None,
) -> list[ExportFile]:
    """Shards as Hugging Face cuts them, distributed evenly over the ranks."""
    loads = dict.fromkeys(range(reads.world_size), 0)
    model = _cut(
        chain(model_items(tensors, names, settings, reads, optimizer), _extra_items(names, reads)),
        settings,
    )
    ranks = assign(model, loads, reads.model)
    shards = [(MODEL_FILES, cut) for cut in model]
    if optimizer is not None and reads.averages is None:
        # After the model, whose pins must not depend on the optimizer.
        states = _cut(_state_items(tensors, names, optimizer), settings)
        ranks += assign(states, loads, reads.states)
        shards += [(OPTIMIZER_FILES, cut) for cut in states]
    counts = {base: sum(kind == base for kind, _ in shards) for base, _ in shards}
    seen: dict[str, int] = {}
    files = []
    for (base, items), rank in zip(shards, ranks, strict=True):
        seen[base] = seen.get(base, 0) + 1
        files.append(file_of(shard_name(base, seen[base], counts[base]), rank, items))
    return files


def shard_name(base: str, number: int, count: int) -> str:
    """Name of shard `number` (from 1) of `count`."""
    return f"{base}{SUFFIX}" if count == 1 else f"{base}-{number:05d}-of-{count:05d}{SUFFIX}"


def model_items(
    tensors: Sequence[TensorLayout],
    names: Mapping[str, str],
    settings: ExportSettings,
    reads: Reads,
    optimizer: OptimizerTable | None,
) -> Iterator[Item]:
    """The parameters and buffers that are written."""
    states = state_positions(tensors, optimizer) if optimizer is not None else {}
    values = reads.averages.values if reads.averages is not None else {}
    for number, tensor in enumerate(tensors):
        if tensor.fqn in reads.unwritten:
            continue
        key, at = reads.source(tensor.fqn, number, states)
        kept = optimizer.states[key][tensor.fqn] if key and optimizer is not None else tensor.dtype
        dtype, blend = settings.dtype_of(kept), reads.blends.get(tensor.fqn)
        for part in tensor.hub:
            spec = TensorSpec(name=part.name, dtype=dtype, shape=part.shape)
            yield Item(spec, tensor, key, at, box=part.box, blend=blend)
        own = () if tensor.hub else (tensor.fqn,)
        for name in (*own, *(tensor.aliases if settings.keep_tied else ())):
            if tensor.fqn in values:
                yield _number_item(tensor, names[name], kept, values[tensor.fqn])
            else:
                spec = TensorSpec(name=names[name], dtype=dtype, shape=tensor.shape)
                yield Item(spec, tensor, key, at, blend=blend)


def _number_item(tensor: TensorLayout, name: str, dtype: str, value: float) -> Item:
    """A number that an optimizer keeps instead of a parameter of one element."""
    spec = TensorSpec(name=name, dtype=dtype, shape=())
    return Item(spec, tensor, "", -1, number_bytes(value, dtype, tensor.fqn))


def _extra_items(names: Mapping[str, str], reads: Reads) -> Iterator[Item]:
    for name, one in reads.constants.items():
        spec = TensorSpec(name=names[name], dtype=one.layout.dtype, shape=one.layout.shape)
        yield Item(spec, one.layout, "", -1, one.data)


def _state_items(
    tensors: Sequence[TensorLayout], names: Mapping[str, str], optimizer: OptimizerTable
) -> Iterator[Item]:
    positions = state_positions(tensors, optimizer)
    for tensor in tensors:
        if tensor.kind is TensorKind.BUFFER:
            continue
        for key in optimizer.keys:
            dtype = optimizer.states[key].get(tensor.fqn)
            if dtype is not None:
                name = f"{names[tensor.fqn]}.{key}"
                spec = TensorSpec(name=name, dtype=dtype, shape=tensor.shape)
                yield Item(spec, tensor, key, positions[key, tensor.fqn])
        for scalar in optimizer.scalars.get(tensor.fqn, ()):
            name = f"{names[tensor.fqn]}.{scalar.key}"
            spec = TensorSpec(name=name, dtype=scalar.dtype, shape=())
            yield Item(spec, tensor, scalar.key, -1, scalar_bytes(scalar))


def _cut(items: Iterator[Item], settings: ExportSettings) -> list[list[Item]]:
    """Fill each shard until the next tensor does not fit; an oversized one gets its own."""
    shards: list[list[Item]] = []
    current: list[Item] = []
    current_bytes = 0
    for item in items:
        if item.size_bytes > settings.max_shard_bytes:
            shards.append([item])
            continue
        if current_bytes + item.size_bytes > settings.max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(item)
        current_bytes += item.size_bytes
    if current:
        shards.append(current)
    return shards


def assign(
    shards: Sequence[Sequence[Item]], loads: dict[int, int], pieces: Mapping[str, Sequence[Piece]]
) -> list[int]:
    """A writer per shard, balancing bytes (its own pieces cost half); updates `loads`."""
    ranks = [min(loads)] * len(shards)
    sizes = [sum(item.size_bytes for item in shard) for shard in shards]
    for number in sorted(range(len(shards)), key=lambda n: -sizes[n]):
        held, size = _held_bytes(shards[number], pieces), 2 * sizes[number]
        cost, rank = min((load + size - held.get(rank, 0), rank) for rank, load in loads.items())
        loads[rank], ranks[number] = cost, rank
    return ranks


def _held_bytes(shard: Sequence[Item], pieces: Mapping[str, Sequence[Piece]]) -> dict[int, int]:
    held: dict[int, int] = {}
    for item in shard:
        if item.constant is None:
            for piece in pieces[item.layout.fqn]:
                size = piece_bytes(piece, item.layout.dtype)
                held[piece.rank] = held.get(piece.rank, 0) + size
    return held


def file_of(name: str, rank: int, items: Sequence[Item]) -> ExportFile:
    by_name = {item.spec.name: item for item in items}
    specs = file_order([item.spec for item in items])
    header = encode_header(specs, METADATA)
    entries = []
    begin = len(header)
    for spec in specs:
        item = by_name[spec.name]
        box = item.box if item.box is not None else full_box(spec.shape)
        entry = Entry(
            spec.name,
            item.state_key,
            item.tensor,
            box,
            spec.dtype,
            begin,
            item.constant,
            item.blend,
        )
        entries.append(entry)
        begin += entry.size_bytes
    return ExportFile(name, rank, header, tuple(entries))


def _finish(plan: ExportPlan, _: TorchFiles) -> dict[str, bytes]:
    found = _indexes(plan.files)
    if plan.with_optimizer:
        assert plan.optimizer is not None
        groups = {"groups": [dict(group) for group in plan.optimizer.groups]}
        found[OPTIMIZER_GROUPS] = json_bytes(groups)
    if plan.extra is not None and plan.extra.values:
        values = {plan.names[name]: value for name, value in plan.extra.values.items()}
        found[EXTRA_STATE] = json_bytes(values)
    return found


def _indexes(files: Iterable[ExportFile]) -> dict[str, bytes]:
    """The index of each kind of file with several shards."""
    found = {}
    for base in (MODEL_FILES, OPTIMIZER_FILES):
        shards = [file for file in files if file.name.startswith(f"{base}-")]
        if shards:
            entries = [(entry, shard.name) for shard in shards for entry in shard.entries]
            weights = {entry.name: name for entry, name in entries}
            total = sum(entry.data_bytes for entry, _ in entries)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            found[f"{base}{SUFFIX}{INDEX}"] = json_bytes(index)
    return found


SAFETENSORS = Format(
    name="safetensors", number=1, endings=(SUFFIX, INDEX), plan=shard_files, finish=_finish
)
