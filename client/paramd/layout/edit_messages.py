"""Operations of an edit <-> paramd.v1 messages, and the digest that names a manifest."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from paramd.errors import UsageError
from paramd.layout.edit_ops import EditKind, EditOp
from paramd.layout.types import Box
from paramd.v1 import sidecar_pb2 as pb

_KINDS = frozenset(int(kind) for kind in EditKind)


def encode_op(op: EditOp) -> pb.EditOp:
    """The message of an operation."""
    return pb.EditOp(
        fqn=op.fqn,
        begin=op.box.begin if op.box is not None else (),
        end=op.box.end if op.box is not None else (),
        kind=pb.EditKind.ValueType(op.kind),
        value=op.value,
        weight=op.weight,
        min=op.min,
        max=op.max,
        with_data=op.with_data,
    )


def decode_ops(messages: Iterable[pb.EditOp]) -> list[EditOp]:
    """The operations of a manifest.

    Raises:
        UsageError: an operation has no kind that is known here.
    """
    return [_decode_op(message) for message in messages]


def manifest_digest(manifest: pb.EditManifest) -> bytes:
    """XXH3 (128 bit, canonical) of the manifest's deterministic bytes."""
    return xxhash.xxh3_128_digest(manifest.SerializeToString(deterministic=True))


def _decode_op(message: pb.EditOp) -> EditOp:
    if message.kind not in _KINDS:
        raise UsageError(
            f"ops: kind {message.kind} of {message.fqn[:200]!r}; expected one of "
            f"{', '.join(kind.word for kind in EditKind)}"
        )
    begin, end = tuple(message.begin), tuple(message.end)
    return EditOp(
        fqn=message.fqn,
        box=Box(begin, end) if begin or end else None,
        kind=EditKind(message.kind),
        value=message.value,
        weight=message.weight,
        min=message.min,
        max=message.max,
        with_data=message.with_data,
    )
