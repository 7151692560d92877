"""What each rank holds, merged into the layout of the job.

The way: every rank describes its own pieces (`LocalLayout`), all ranks exchange them
(`codec.encode_local`), and each merges the same list into the same `Layout`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from paramd.errors import UsageError
from paramd.layout import coverage
from paramd.layout.dtypes import ITEM_BYTES
from paramd.layout.regions import is_dense, is_row_major
from paramd.layout.types import Box, Interval, Layout, Piece, TensorKind, TensorLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One tensor as one rank sees it; `pieces` is empty when the rank's shard is."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """Global and unsharded."""
    kind: TensorKind
    placement: str
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayout:
    """All tensors of the module tree, in its order, with what one rank holds of them."""

    rank: int
    arena_bytes: int
    tensors: tuple[LocalTensor, ...]


def merge_layouts(locals: Sequence[LocalLayout], *, mirrored: bool = False) -> Layout:
    """Merges the descriptions of all ranks, in any order, into one layout.

    Args:
        locals: one description of each rank.
        mirrored: whether the arenas are copies of parameters that stay where they are.

    The order of tensors and their placements are those of rank 0; aliases are united.
    Pieces without elements are dropped; strides that are row-major become None.

    Raises:
        UsageError: a rank is missing or there twice, ranks disagree on a tensor, a piece
            lies outside of its arena or tensor, or an element has no holder or holders
            with different regions.
    """
    ordered = sorted(locals, key=lambda local: local.rank)
    ranks = [local.rank for local in ordered]
    if not ordered or ranks != list(range(len(ordered))):
        raise UsageError(f"expected one layout from every rank 0..n-1, got ranks {ranks}")
    first = ordered[0]
    by_name = [_by_name(local) for local in ordered]
    for local, names in zip(ordered[1:], by_name[1:], strict=True):
        _check_same_names(by_name[0], names, local.rank)
    arena_bytes = tuple(local.arena_bytes for local in ordered)
    return Layout(
        world_size=len(ordered),
        arena_bytes=arena_bytes,
        tensors=tuple(
            _merge_tensor([names[tensor.fqn] for names in by_name], arena_bytes)
            for tensor in first.tensors
        ),
        mirrored=mirrored,
    )


def layout_digest(layout: Layout) -> str:
    """64 hex digits that name the layout: equal layouts, and only they, have the same."""
    digest = hashlib.sha256(b"paramd layout 1\n")
    for part in (layout.world_size, layout.arena_bytes, *map(_canonical, layout.tensors)):
        digest.update(json.dumps(part, separators=(",", ":")).encode())
        digest.update(b"\n")
    if layout.mirrored:
        digest.update(b"mirrored\n")
    return digest.hexdigest()


def _canonical(tensor: TensorLayout) -> list[object]:
    return [
        tensor.fqn,
        tensor.aliases,
        tensor.dtype,
        tensor.shape,
        tensor.kind.value,
        tensor.placement,
        [[p.rank, p.arena_begin, p.region.begin, p.region.end, p.strides] for p in tensor.pieces],
    ]


def _by_name(local: LocalLayout) -> dict[str, LocalTensor]:
    names: dict[str, LocalTensor] = {}
    seen: set[str] = set()
    for tensor in local.tensors:
        for name in (tensor.fqn, *tensor.aliases):
            if name in seen:
                raise UsageError(f"rank {local.rank} names {name!r} twice; names must be unique")
            seen.add(name)
        names[tensor.fqn] = tensor
    return names


def _check_same_names(
    first: dict[str, LocalTensor], names: dict[str, LocalTensor], rank: int
) -> None:
    missing = next((fqn for fqn in first if fqn not in names), None)
    if missing is not None:
        raise UsageError(f"rank 0 has tensor {missing!r} but rank {rank} does not name it")
    extra = next((fqn for fqn in names if fqn not in first), None)
    if extra is not None:
        raise UsageError(f"rank {rank} has tensor {extra!r} but rank 0 does not name it")


def _merge_tensor(tensors: list[LocalTensor], arena_bytes: tuple[int, ...]) -> TensorLayout:
    first = tensors[0]
    if first.dtype not in ITEM_BYTES:
        raise UsageError(f"tensor {first.fqn!r} has dtype {first.dtype!r}, which is not supported")
    pieces: list[Piece] = []
    for rank, tensor in enumerate(tensors):
        for field in ("dtype", "shape", "kind"):
            ours, theirs = getattr(first, field), getattr(tensor, field)
            if ours != theirs:
                raise UsageError(
                    f"tensor {first.fqn!r}: rank 0 says {field} {ours}, rank {rank} says {theirs}"
                )
        pieces.extend(
            _checked(piece, tensor, rank, arena_bytes[rank])
            for piece in tensor.pieces
            if piece.region.numel or coverage.outside(piece.region, tensor.shape)
        )
    defect = coverage.defect(first.shape, tuple(piece.region for piece in pieces))
    if defect is not None:
        holders = sorted({piece.rank for piece in pieces})
        raise UsageError(
            f"tensor {first.fqn!r} of shape {list(first.shape)}: {defect}; ranks {holders} "
            f"of {len(tensors)} hold pieces; expected every element in exactly one region"
        )
    return TensorLayout(
        fqn=first.fqn,
        dtype=first.dtype,
        shape=first.shape,
        kind=first.kind,
        pieces=tuple(pieces),
        aliases=tuple(dict.fromkeys(alias for tensor in tensors for alias in tensor.aliases)),
        placement=first.placement,
    )


def _checked(piece: Piece, tensor: LocalTensor, rank: int, arena_bytes: int) -> Piece:
    reason = _wrong(piece, tensor, rank, arena_bytes)
    if reason is not None:
        raise UsageError(f"tensor {tensor.fqn!r}, rank {rank}: {reason}")
    if piece.strides is None or not isinstance(piece.region, Box):
        return piece
    if not is_row_major(piece.region.sizes, piece.strides):
        return piece
    return Piece(rank=rank, arena_begin=piece.arena_begin, region=piece.region)


def _wrong(piece: Piece, tensor: LocalTensor, rank: int, arena_bytes: int) -> str | None:
    if piece.rank != rank:
        return f"its piece says rank {piece.rank}"
    outside = coverage.outside(piece.region, tensor.shape)
    if outside is not None:
        return outside
    end = piece.arena_begin + piece.region.numel * ITEM_BYTES[tensor.dtype]
    if not 0 <= piece.arena_begin <= end <= arena_bytes:
        return f"bytes [{piece.arena_begin}, {end}) lie outside of its arena of {arena_bytes} bytes"
    if piece.strides is None:
        return None
    if isinstance(piece.region, Interval):
        return "an interval has no strides; expected None"
    sizes = piece.region.sizes
    if len(piece.strides) != len(sizes) or not is_dense(sizes, piece.strides):
        return f"strides {piece.strides} are not dense for sizes {sizes}"
    return None
