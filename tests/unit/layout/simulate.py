"""Ranks that hold tensors as torch's wrappers would, with real bytes."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from paramd.layout.dtypes import item_bytes
from paramd.layout.merge import LocalLayout, merge_layouts
from paramd.layout.plan import ReadPlan, blocks
from paramd.layout.types import (
    Box,
    Interval,
    Layout,
    Piece,
    Region,
    TensorKind,
    TensorLayout,
    full_box,
    row_major,
)

ALIGNMENT_BYTES = 64

Held = list[list[tuple[Region, tuple[int, ...] | None]]]
"""For each rank the regions it holds of one tensor, with their strides."""


@dataclass(frozen=True)
class Spec:
    """A full tensor of the simulated model."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """Rows of one rank, as torch.chunk cuts: all but the last are ceil(size / parts)."""
    rows = -(-size // parts)
    return min(part * rows, size), min((part + 1) * rows, size)


def cut(box: Box, dim: int, parts: int, part: int) -> Box:
    """The part of `box` that one of `parts` ranks has when `dim` is sharded."""
    if len(box.begin) <= dim:
        return box
    low, high = chunk(box.end[dim] - box.begin[dim], parts, part)
    begin, end = list(box.begin), list(box.end)
    end[dim] = begin[dim] + high
    begin[dim] += low
    return Box(tuple(begin), tuple(end))


def _per_rank(world: int, region_of: Callable[[int], Box]) -> Held:
    return [[(region_of(rank), None)] for rank in range(world)]


def replicated(spec: Spec, world: int) -> Held:
    return _per_rank(world, lambda rank: full_box(spec.shape))


def fsdp2(spec: Spec, world: int) -> Held:
    return _per_rank(world, lambda rank: cut(full_box(spec.shape), 0, world, rank))


def tensor_parallel(spec: Spec, world: int) -> Held:
    return _per_rank(world, lambda rank: cut(full_box(spec.shape), 1, world, rank))


def transposed(spec: Spec, world: int) -> Held:
    held: Held = []
    for rank in range(world):
        box = cut(full_box(spec.shape), 0, world, rank)
        strides = tuple(reversed(row_major(box.sizes[::-1])))
        held.append([(box, strides if spec.shape else None)])
    return held


def _mesh(world: int) -> tuple[int, int]:
    return (world // 2, 2) if world % 2 == 0 else (world, 1)


def strided(spec: Spec, world: int) -> Held:
    """TP and FSDP2 both shard dim 0: TP outside, although its mesh axis is the inner one."""
    data, model = _mesh(world)
    return _per_rank(
        world,
        lambda rank: cut(cut(full_box(spec.shape), 0, model, rank % model), 0, data, rank // model),
    )


def grid(spec: Spec, world: int) -> Held:
    data, model = _mesh(world)
    return _per_rank(
        world,
        lambda rank: cut(cut(full_box(spec.shape), 1, model, rank % model), 0, data, rank // model),
    )


def hybrid(spec: Spec, world: int) -> Held:
    _, shards = _mesh(world)
    return _per_rank(world, lambda rank: cut(full_box(spec.shape), 0, shards, rank % shards))


BOXES: dict[str, Callable[[Spec, int], Held]] = {
    held.__name__: held
    for held in (replicated, fsdp2, tensor_parallel, transposed, strided, grid, hybrid)
}


def fsdp1(specs: Sequence[Spec], world: int) -> list[Held]:
    """One flat parameter over all tensors, padded to equal shards that cross their borders."""
    total = sum(spec.numel for spec in specs)
    shard = -(-total // world)
    held: list[Held] = []
    offset = 0
    for spec in specs:
        ranks: Held = []
        for rank in range(world):
            begin = min(max(rank * shard - offset, 0), spec.numel)
            end = min(max((rank + 1) * shard - offset, 0), spec.numel)
            ranks.append([(Interval(begin, end), None)] if begin < end else [])
        held.append(ranks)
        offset += spec.numel
    return held


@dataclass(frozen=True)
class World:
    """A layout with the bytes behind it."""

    layout: Layout
    arenas: list[bytes]
    full: dict[str, bytes]
    """Row-major bytes of every full tensor."""

    def snapshots(self, plan: ReadPlan) -> dict[int, bytes]:
        return {
            read.rank: b"".join(self.arenas[read.rank][begin:end] for begin, end in read.spans)
            for read in plan.ranks
        }

    def laid(self, full: Mapping[str, bytes], rank: int) -> bytes:
        """A rank's arena with these row-major bytes of the full tensors."""
        memory = bytearray(self.arenas[rank])
        for tensor in self.layout.tensors:
            spec = Spec(tensor.fqn, tensor.dtype, tensor.shape)
            for piece in tensor.pieces:
                if piece.rank == rank:
                    data = memory_of(piece.region, piece.strides, spec, full[tensor.fqn])
                    memory[piece.arena_begin : piece.arena_begin + len(data)] = data
        return bytes(memory)

    def expected(self, plan: ReadPlan) -> list[bytes]:
        return [
            b"".join(
                element(self.full[tensor.fqn], at, item_bytes(tensor.dtype))
                for at in flat_indexes(tensor.box, tensor.global_shape)
            )
            for tensor in plan.tensors
        ]


def element(data: bytes, at: int, size: int) -> bytes:
    return data[at * size : (at + 1) * size]


def flat_indexes(box: Box, shape: Sequence[int]) -> Iterator[int]:
    """Row-major positions within `shape` of a box's elements, in row-major order of the box."""
    strides = row_major(shape)
    for index in itertools.product(*map(range, box.begin, box.end)):
        yield sum(i * s for i, s in zip(index, strides, strict=True))


def build(specs: Sequence[Spec], held: Sequence[Held], seed: int = 0) -> World:
    """Fills arenas, whose unused bytes are junk, and merges the layout."""
    source = random.Random(seed)
    full = {spec.fqn: source.randbytes(spec.numel * item_bytes(spec.dtype)) for spec in specs}
    world = len(held[0])
    locals_: list[LocalLayout] = []
    arenas: list[bytes] = []
    for rank in range(world):
        arena = bytearray(source.randbytes(source.randrange(200)))
        tensors: list[TensorLayout] = []
        for spec, ranks in zip(specs, held, strict=True):
            pieces: list[Piece] = []
            for region, strides in ranks[rank]:
                arena.extend(source.randbytes(-len(arena) % ALIGNMENT_BYTES))
                pieces.append(Piece(rank, len(arena), region, strides))
                arena.extend(memory_of(region, strides, spec, full[spec.fqn]))
            tensors.append(
                TensorLayout(
                    fqn=spec.fqn,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    kind=TensorKind.PARAMETER,
                    placement="simulated",
                    pieces=tuple(pieces),
                )
            )
        locals_.append(LocalLayout(rank=rank, arena_bytes=len(arena), tensors=tuple(tensors)))
        arenas.append(bytes(arena))
    return World(merge_layouts(locals_), arenas, full)


def memory_of(
    region: Region, strides: tuple[int, ...] | None, spec: Spec, full: bytes
) -> bytearray:
    """What a rank's memory has for a region."""
    size = item_bytes(spec.dtype)
    if isinstance(region, Interval):
        return bytearray(full[region.begin * size : region.end * size])
    memory = bytearray(region.numel * size)
    steps = strides if strides is not None else row_major(region.sizes)
    local = itertools.product(*map(range, region.sizes))
    for index, at in zip(local, flat_indexes(region, spec.shape), strict=True):
        to = sum(i * s for i, s in zip(index, steps, strict=True))
        memory[to * size : (to + 1) * size] = element(full, at, size)
    return memory


def gather(
    plan: ReadPlan, snapshots: dict[int, bytes], max_block_bytes: int | None = None
) -> list[bytes]:
    """Executes a plan; every element must be written exactly once.

    With `max_block_bytes` the landings that are not direct go through blocks, and nothing
    outside of a block is looked at.
    """
    results = [torch.zeros(tensor.size_bytes, dtype=torch.uint8) for tensor in plan.tensors]
    written = [torch.zeros_like(result) for result in results]
    for read in plan.ranks:
        data = torch.tensor(list(snapshots[read.rank]), dtype=torch.uint8)
        assert len(data) == read.size_bytes
        for landing in read.landings:
            tensor = plan.tensors[landing.tensor]
            size = item_bytes(tensor.dtype)
            result, count = results[landing.tensor], written[landing.tensor]
            if landing.direct:
                assert landing.target_begin_bytes is not None
                part = slice(
                    landing.target_begin_bytes, landing.target_begin_bytes + landing.size_bytes
                )
                result[part] = data[landing.begin_bytes : landing.end_bytes]
                count[part] += 1
                continue
            assert isinstance(landing.target, Box)
            views = [(landing.begin_bytes, landing.end_bytes, landing.target)]
            if max_block_bytes is not None:
                views = [
                    (b.begin_bytes, b.end_bytes, b.target)
                    for b in blocks(landing, size, max_block_bytes)
                ]
                assert all(end - begin <= max_block_bytes for begin, end, _ in views)
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(views))
            for begin, end, target in views:
                # A view of bytes that ends where the block does: torch refuses to look beyond.
                steps = (*(stride * size for stride in landing.strides), 1)
                source = data[begin:end].clone().as_strided((*target.sizes, size), steps)
                place = tuple(map(slice, target.begin, target.end))
                result.view(*tensor.shape, size)[place] = source
                count.view(*tensor.shape, size)[place] += 1
    assert all(bool((count == 1).all()) for count in written)
    return [bytes(result.tolist()) for result in results]
