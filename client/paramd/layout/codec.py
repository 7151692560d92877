"""Layouts as paramd.v1 messages, and one rank's layout as bytes for its peers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from google.protobuf.message import DecodeError

from paramd import bounds
from paramd.errors import ExhaustedError, UsageError
from paramd.layout.adapters import decode_adapters, encode_adapters
from paramd.layout.merge import LocalLayout
from paramd.layout.types import (
    Box,
    HubPart,
    Interval,
    Layout,
    Piece,
    Region,
    TensorKind,
    TensorLayout,
)
from paramd.v1 import layout_pb2

_KIND_TO_PB = {
    TensorKind.PARAMETER: layout_pb2.TENSOR_KIND_PARAMETER,
    TensorKind.BUFFER: layout_pb2.TENSOR_KIND_BUFFER,
}
_KIND_FROM_PB = {theirs: ours for ours, theirs in _KIND_TO_PB.items()}
_TRAINABLE_TO_PB = {
    None: layout_pb2.TRAINABLE_UNSPECIFIED,
    True: layout_pb2.TRAINABLE_YES,
    False: layout_pb2.TRAINABLE_NO,
}
_TRAINABLE_FROM_PB = {theirs: ours for ours, theirs in _TRAINABLE_TO_PB.items()}
_RANK = struct.Struct("<q")

MAX_LAYOUT_BYTES = bounds.LAYOUT_BYTES
"""Most bytes of all batches of a received layout together: a rank's description is bounded."""
MAX_NAMES = bounds.LAYOUT_NAMES
"""Names of tensors, aliases included."""
MAX_NAME_CHARS = bounds.LAYOUT_NAME_CHARS
MAX_NAMES_CHARS = bounds.LAYOUT_NAMES_CHARS
"""Names times the longest of them: the size of their index, in characters."""


def encode_layout(layout: Layout) -> layout_pb2.Layout:
    (whole,) = layout_batches(layout, max(len(layout.tensors), 1))
    return whole


def decode_layout(message: layout_pb2.Layout) -> Layout:
    """The layout of a message, as `encode_layout` made it; UsageError if it is inconsistent."""
    if message.world_size != len(message.arena_bytes):
        raise UsageError(
            f"a layout of {message.world_size} ranks has {len(message.arena_bytes)} arenas; "
            "expected one for each rank"
        )
    return Layout(
        world_size=message.world_size,
        arena_bytes=tuple(message.arena_bytes),
        tensors=tuple(map(_decode_tensor, message.tensors)),
        mirrored=message.mirrored,
        missing=tuple(message.missing),
        hub_note=message.hub_note,
        adapters=decode_adapters(message.adapters),
    )


def layout_batches(layout: Layout, max_tensors: int = 1000) -> Iterator[layout_pb2.Layout]:
    """Messages, at least one, of at most `max_tensors`; only the first has the ranks' fields."""
    for begin in range(0, max(len(layout.tensors), 1), max_tensors):
        batch = layout_pb2.Layout(
            tensors=map(_encode_tensor, layout.tensors[begin : begin + max_tensors])
        )
        if begin == 0:
            batch.world_size = layout.world_size
            batch.arena_bytes.extend(layout.arena_bytes)
            batch.mirrored = layout.mirrored
            batch.missing.extend(layout.missing)
            batch.hub_note = layout.hub_note
            batch.adapters = encode_adapters(layout.adapters)
        yield batch


class LayoutBound:
    """Counts the batches that a rank sends as its layout."""

    def __init__(self, who: str) -> None:
        """`who` sends it, for errors."""
        self._who = who
        self._bytes = self._names = self._longest = 0

    def count(self, batch: layout_pb2.Layout) -> None:
        """Count one more batch, before it is kept; ExhaustedError beyond the bound."""
        self._bytes += batch.ByteSize()
        self._names += sum(1 + len(tensor.aliases) for tensor in batch.tensors)
        names = (name for tensor in batch.tensors for name in (tensor.fqn, *tensor.aliases))
        self._longest = max(self._longest, max(map(len, names), default=0))
        for what, found, most in (
            ("bytes", self._bytes, MAX_LAYOUT_BYTES),
            ("names", self._names, MAX_NAMES),
            ("characters in one name", self._longest, MAX_NAME_CHARS),
            ("names times the longest", self._names * self._longest, MAX_NAMES_CHARS),
        ):
            if found > most:
                raise ExhaustedError(
                    f"{self._who} sends a layout of {found:,} {what}; expected at most {most:,}"
                )


def join_batches(batches: Iterable[layout_pb2.Layout]) -> Layout:
    """The layout of `layout_batches`, taken in order. Raises as `decode_layout`."""
    whole = layout_pb2.Layout()
    for batch in batches:
        whole.MergeFrom(batch)
    return decode_layout(whole)


def encode_local(local: LocalLayout) -> bytes:
    """One rank's description, for its peers."""
    message = layout_pb2.Layout(
        arena_bytes=[local.arena_bytes],
        tensors=map(_encode_tensor, local.tensors),
        missing=local.missing,
        hub_note=local.hub_note,
        adapters=encode_adapters(local.adapters),
    )
    return _RANK.pack(local.rank) + message.SerializeToString(deterministic=True)


def decode_local(data: bytes) -> LocalLayout:
    """The inverse of `encode_local`; UsageError for malformed bytes."""
    try:
        (rank,) = _RANK.unpack_from(data)
        message = layout_pb2.Layout.FromString(data[_RANK.size :])
        (arena_bytes,) = message.arena_bytes
    except (struct.error, DecodeError, ValueError) as error:
        raise UsageError(
            f"{len(data)} bytes are not the layout of a rank ({error}); "
            "do all ranks run the same version of paramd?"
        ) from error
    return LocalLayout(
        rank=rank,
        arena_bytes=arena_bytes,
        tensors=tuple(map(_decode_tensor, message.tensors)),
        missing=tuple(message.missing),
        hub_note=message.hub_note,
        adapters=decode_adapters(message.adapters),
    )


def _encode_tensor(tensor: TensorLayout) -> layout_pb2.Tensor:
    return layout_pb2.Tensor(
        fqn=tensor.fqn,
        aliases=tensor.aliases,
        dtype=tensor.dtype,
        shape=tensor.shape,
        kind=_KIND_TO_PB[tensor.kind],
        placement=tensor.placement,
        pieces=map(_encode_piece, tensor.pieces),
        trainable=_TRAINABLE_TO_PB[tensor.trainable],
        hub=[
            layout_pb2.HubPart(name=one.name, box=_encode_box(one.box), shape=one.shape)
            for one in tensor.hub
        ],
    )


def _encode_box(box: Box) -> layout_pb2.Box:
    return layout_pb2.Box(begin=box.begin, end=box.end)


def _encode_piece(piece: Piece) -> layout_pb2.Piece:
    message = layout_pb2.Piece(
        rank=piece.rank,
        arena_begin=piece.arena_begin,
        strides=piece.strides if piece.strides is not None else (),
    )
    if isinstance(piece.region, Box):
        message.box.CopyFrom(_encode_box(piece.region))
    else:
        message.interval.CopyFrom(
            layout_pb2.Interval(begin=piece.region.begin, end=piece.region.end)
        )
    return message


def _decode_tensor(message: layout_pb2.Tensor) -> TensorLayout:
    return TensorLayout(
        fqn=message.fqn,
        dtype=message.dtype,
        shape=tuple(message.shape),
        kind=_decode_kind(message),
        pieces=tuple(_decode_piece(piece, message.fqn) for piece in message.pieces),
        aliases=tuple(message.aliases),
        placement=message.placement,
        # A value from a newer version is one that we do not know.
        trainable=_TRAINABLE_FROM_PB.get(message.trainable),
        hub=tuple(
            HubPart(one.name, _decode_box(one.box, message.fqn), tuple(one.shape))
            for one in message.hub
        ),
    )


def _decode_kind(message: layout_pb2.Tensor) -> TensorKind:
    kind = _KIND_FROM_PB.get(message.kind)
    if kind is None:
        raise UsageError(
            f"tensor {message.fqn!r} has kind {message.kind}; expected parameter or buffer"
        )
    return kind


def _decode_piece(message: layout_pb2.Piece, fqn: str) -> Piece:
    region: Region
    which = message.WhichOneof("region")
    if which == "box":
        region = _decode_box(message.box, fqn)
    elif which == "interval":
        region = Interval(message.interval.begin, message.interval.end)
    else:
        raise UsageError(f"a piece of tensor {fqn!r} has no region; expected a box or an interval")
    return Piece(
        rank=message.rank,
        arena_begin=message.arena_begin,
        region=region,
        strides=tuple(message.strides) if message.strides else None,
    )


def _decode_box(box: layout_pb2.Box, fqn: str) -> Box:
    if len(box.begin) != len(box.end):
        raise UsageError(
            f"a box of tensor {fqn!r} has {len(box.begin)} begins and {len(box.end)} ends; "
            "expected one of each for every dim"
        )
    return Box(tuple(box.begin), tuple(box.end))
