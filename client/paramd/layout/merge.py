"""Merge each rank's pieces into the layout of the job.

Every rank describes its own pieces (`LocalLayout`), all ranks exchange them
(`codec.encode_local`), and each merges the same list into the same `Layout`. Ranks may have
different modules (stages of a pipeline, experts): the layout has the tensors of all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from paramd.errors import UsageError
from paramd.layout.adapters import Adapter, encode_adapters, merge_adapters
from paramd.layout.dtypes import ITEM_BYTES
from paramd.layout.types import (
    Box,
    Interval,
    Layout,
    Piece,
    Region,
    TensorKind,
    TensorLayout,
    flat_interval,
    full_box,
    intersection,
    is_dense,
    is_row_major,
)

OTHER_NAMES = (
    "if the ranks have different modules (stages of a pipeline, experts), give each a name of its "
    "own: paramd.attach({'stage0': module}, ...)"
)


def outside(region: Region, shape: Sequence[int]) -> str | None:
    """Why `region` is not part of a tensor of `shape`; None if it is."""
    if isinstance(region, Interval):
        if 0 <= region.begin <= region.end <= prod(shape):
            return None
        return f"interval [{region.begin}, {region.end}) is outside of {prod(shape)} elements"
    if not len(region.begin) == len(region.end) == len(shape):
        return f"box {region.begin}..{region.end} does not have the tensor's {len(shape)} dims"
    for dim, (begin, end, size) in enumerate(zip(region.begin, region.end, shape, strict=True)):
        if not 0 <= begin <= end <= size:
            return f"box [{begin}, {end}) is outside of dim {dim} with size {size}"
    return None


@lru_cache(maxsize=4096)
def defect(shape: tuple[int, ...], regions: tuple[Region, ...]) -> str | None:
    """Why the regions do not cover every element exactly once; None if they do.

    Equal regions are replicas and count once. Cached, since the layers of a model are alike.
    Intervals and grids of boxes cost a sort.
    """
    distinct = [region for region in dict.fromkeys(regions) if region.numel]
    boxes = [region for region in distinct if isinstance(region, Box)]
    if boxes and len(boxes) < len(distinct):
        intervals = {flat_interval(r, shape) if isinstance(r, Box) else r for r in distinct}
        if None in intervals:
            return "its ranks mix boxes with intervals"
        return _defect_of_intervals([one for one in intervals if one is not None], prod(shape))
    if boxes:
        return _defect_of_boxes(boxes, shape)
    return _defect_of_intervals([r for r in distinct if isinstance(r, Interval)], prod(shape))


def _defect_of_intervals(intervals: list[Interval], numel: int) -> str | None:
    reached = 0
    for interval in sorted(intervals, key=lambda i: (i.begin, i.end)):
        if interval.begin > reached:
            return f"no rank holds elements [{reached}, {interval.begin})"
        if interval.begin < reached:
            return f"different regions hold elements [{interval.begin}, {reached})"
        reached = interval.end
    return None if reached == numel else f"no rank holds elements [{reached}, {numel})"


def _defect_of_boxes(boxes: list[Box], shape: tuple[int, ...]) -> str | None:
    if boxes == [full_box(shape)]:
        return None
    for one, other in overlaps(boxes, len(shape)):
        return f"different boxes overlap: {_said(one)} and {_said(other)}"
    missing = prod(shape) - sum(box.numel for box in boxes)
    return f"no rank holds {missing} of its {prod(shape)} elements" if missing else None


def overlaps(boxes: list[Box], ndim: int) -> Iterable[tuple[Box, Box]]:
    """Pairs of boxes that share an element."""
    # Sweeping along the dim with the most cuts keeps the fewest boxes active.
    dim = max(range(ndim), key=lambda d: len({box.begin[d] for box in boxes}), default=0)
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.begin[dim] if ndim else 0):
        active = [other for other in active if other.end[dim] > box.begin[dim]] if ndim else active
        for other in active:
            if intersection(box, other) is not None:
                yield other, box
        active.append(box)


def _said(box: Box) -> str:
    return "[" + ", ".join(f"{b}:{e}" for b, e in zip(box.begin, box.end, strict=True)) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayout:
    """All tensors of the module tree, in its order, as one rank sees them."""

    rank: int
    arena_bytes: int
    tensors: tuple[TensorLayout, ...]
    """With this rank's pieces, none if its shard is empty; trainable as it is here."""
    missing: tuple[str, ...] = ()
    hub_note: str = ""
    adapters: tuple[Adapter, ...] = ()
    """As in `Layout`."""


def merge_layouts(locals: Sequence[LocalLayout], *, mirrored: bool = False) -> Layout:
    """Merge the descriptions of all ranks, in any order, into one layout.

    Tensors are in the order of rank 0, followed by the additional ones of each further rank;
    placements are those of the first rank that has the tensor; aliases are united; trainable is
    true if it is on any rank. Empty pieces are dropped; row-major strides become None. `mirrored`:
    the arenas are copies of parameters that stay elsewhere.

    Raises:
        UsageError: A rank is missing or duplicate, ranks disagree on a tensor or its names, a
            piece is outside of its arena or tensor, or an element has no holder or holders with
            different regions.
    """
    ordered = sorted(locals, key=lambda local: local.rank)
    ranks = [local.rank for local in ordered]
    if not ordered or ranks != list(range(len(ordered))):
        raise UsageError(f"expected one layout from every rank 0..n-1, got ranks {ranks}")
    by_name: dict[str, dict[int, TensorLayout]] = {}
    for local in ordered:
        for fqn, tensor in _by_name(local).items():
            by_name.setdefault(fqn, {})[local.rank] = tensor
    _check_aliases(by_name)
    arena_bytes = tuple(local.arena_bytes for local in ordered)
    missing = dict.fromkeys(name for local in ordered for name in local.missing)
    hub_notes = [local.hub_note for local in ordered if local.hub_note]
    return Layout(
        world_size=len(ordered),
        arena_bytes=arena_bytes,
        tensors=tuple(_merge_tensor(tensors, arena_bytes) for tensors in by_name.values()),
        mirrored=mirrored,
        missing=tuple(missing),
        hub_note=hub_notes[0] if hub_notes else "",
        adapters=merge_adapters(local.adapters for local in ordered),
    )


def layout_digest(layout: Layout) -> str:
    """SHA-256 of the layout, as 64 hex digits."""
    digest = hashlib.sha256(b"paramd layout 1\n")
    for part in (layout.world_size, layout.arena_bytes, *map(_canonical, layout.tensors)):
        digest.update(json.dumps(part, separators=(",", ":")).encode())
        digest.update(b"\n")
    if layout.mirrored:
        digest.update(b"mirrored\n")
    if layout.adapters:
        # Readers keep a layout by its digest, and merge by these scales.
        digest.update(encode_adapters(layout.adapters).encode())
    return digest.hexdigest()


def _canonical(tensor: TensorLayout) -> list[object]:
    return [
        *([] if tensor.trainable is None else [tensor.trainable]),
        tensor.fqn,
        tensor.aliases,
        tensor.dtype,
        tensor.shape,
        tensor.kind.value,
        tensor.placement,
        [[p.rank, p.arena_begin, p.region.begin, p.region.end, p.strides] for p in tensor.pieces],
    ]


def _by_name(local: LocalLayout) -> dict[str, TensorLayout]:
    names: dict[str, TensorLayout] = {}
    seen: set[str] = set()
    for tensor in local.tensors:
        for name in (tensor.fqn, *tensor.aliases):
            if name in seen:
                raise UsageError(f"rank {local.rank} names {name!r} twice; names must be unique")
            seen.add(name)
        names[tensor.fqn] = tensor
    return names


def _check_aliases(by_name: dict[str, dict[int, TensorLayout]]) -> None:
    """Raise UsageError if ranks disagree on which names are of one tensor."""
    canonical = {fqn: (fqn, next(iter(tensors))) for fqn, tensors in by_name.items()}
    for fqn, tensors in by_name.items():
        for rank, tensor in tensors.items():
            for alias in tensor.aliases:
                known, first = canonical.setdefault(alias, (fqn, rank))
                if known != fqn:
                    other = f"of {known!r}" if known != alias else "of a tensor of its own"
                    raise UsageError(
                        f"{alias!r} is a name of tensor {fqn!r} on rank {rank}, but on rank "
                        f"{first} {other}; tie the same tensors on all ranks that have them"
                    )


def _merge_tensor(tensors: dict[int, TensorLayout], arena_bytes: tuple[int, ...]) -> TensorLayout:
    """Merge one tensor, by rank; ranks that do not have it are absent."""
    at, first = next(iter(tensors.items()))
    if first.dtype not in ITEM_BYTES:
        raise UsageError(f"tensor {first.fqn!r} has dtype {first.dtype!r}, which is not supported")
    pieces: list[Piece] = []
    for rank, tensor in tensors.items():
        _check_alike(first, at, tensor, rank)
        pieces.extend(
            _checked(piece, tensor, rank, arena_bytes[rank])
            for piece in tensor.pieces
            if piece.region.numel or outside(piece.region, tensor.shape)
        )
    _check_covered(first, pieces, tensors, len(arena_bytes))
    aliases = dict.fromkeys(alias for tensor in tensors.values() for alias in tensor.aliases)
    known = [tensor.trainable for tensor in tensors.values() if tensor.trainable is not None]
    trainable = any(known) if known else None
    return replace(first, pieces=tuple(pieces), aliases=tuple(aliases), trainable=trainable)


def _check_alike(first: TensorLayout, at: int, tensor: TensorLayout, rank: int) -> None:
    """Raise UsageError if a rank's tensor is another than the `first`, which rank `at` has."""
    for field, ours, theirs in (
        ("dtype", first.dtype, tensor.dtype),
        ("shape", first.shape, tensor.shape),
        ("kind", first.kind, tensor.kind),
    ):
        if ours != theirs:
            raise UsageError(
                f"tensor {first.fqn!r}: {field} is {ours} on rank {at}, {theirs} on rank "
                f"{rank}; {OTHER_NAMES}"
            )


def _check_covered(
    tensor: TensorLayout, pieces: Sequence[Piece], having: Collection[int], world_size: int
) -> None:
    """Raise UsageError unless the pieces have every element in exactly one region.

    `having`: the ranks that know the tensor.
    """
    reason = defect(tensor.shape, tuple(piece.region for piece in pieces))
    if reason is None:
        return
    holders = sorted({piece.rank for piece in pieces})
    without = [rank for rank in range(world_size) if rank not in having]
    unknown = f", ranks {without} do not know it" if without else ""
    raise UsageError(
        f"tensor {tensor.fqn!r} of shape {list(tensor.shape)}: {reason}; ranks {holders} "
        f"of {world_size} hold pieces{unknown}; expected every element in exactly one region"
    )


def whole_parameters(local: LocalLayout) -> list[str]:
    """Names of the parameters that this rank holds unsharded, in order."""
    return [
        tensor.fqn
        for tensor in local.tensors
        if tensor.kind is TensorKind.PARAMETER
        and [piece.region for piece in tensor.pieces] == [full_box(tensor.shape)]
    ]


def check_replicas(contents: Sequence[Mapping[str, int]]) -> None:
    """Raise UsageError if ranks hold a parameter unsharded, but with different contents.

    `contents`: by rank, a digest of each parameter in `whole_parameters`.
    """
    first: dict[str, tuple[int, int]] = {}
    for rank, digests in enumerate(contents):
        for fqn, digest in digests.items():
            holder, known = first.setdefault(fqn, (rank, digest))
            if digest != known:
                raise UsageError(
                    f"parameter {fqn!r} is unsharded on ranks {holder} and {rank}, but with "
                    f"different contents. If it is the same parameter, make it equal on all ranks "
                    f"(broadcast it) before paramd.attach; {OTHER_NAMES}"
                )


def _checked(piece: Piece, tensor: TensorLayout, rank: int, arena_bytes: int) -> Piece:
    reason = _wrong(piece, tensor, rank, arena_bytes)
    if reason is not None:
        raise UsageError(f"tensor {tensor.fqn!r}, rank {rank}: {reason}")
    if piece.strides is None or not isinstance(piece.region, Box):
        return piece
    if not is_row_major(piece.region.sizes, piece.strides):
        return piece
    return Piece(rank=rank, arena_begin=piece.arena_begin, region=piece.region)


def _wrong(piece: Piece, tensor: TensorLayout, rank: int, arena_bytes: int) -> str | None:
    if piece.rank != rank:
        return f"its piece says rank {piece.rank}"
    beyond = outside(piece.region, tensor.shape)
    if beyond is not None:
        return beyond
    end = piece.arena_begin + piece.region.numel * ITEM_BYTES[tensor.dtype]
    if not 0 <= piece.arena_begin <= end <= arena_bytes:
        return f"bytes [{piece.arena_begin}, {end}) are outside of its arena of {arena_bytes} bytes"
    if piece.strides is None:
        return None
    if isinstance(piece.region, Interval):
        return "an interval has no strides; expected None"
    sizes = piece.region.sizes
    if len(piece.strides) != len(sizes) or not is_dense(sizes, piece.strides):
        return f"strides {piece.strides} are not dense for sizes {sizes}"
    return None
