"""From what is asked for to the manifest that all ranks stage, and what documents say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramd.errors import UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.edits.kinds import NUMBERS
from paramd.layout.edits.ops import OpSpec, decode_ops, edit_ops, encode_op, manifest_digest
from paramd.layout.edits.plan import PlannedOp, RankEdit, check_ops, finder, rank_edits
from paramd.layout.select import NameIndex
from paramd.layout.stats import Stats, merge_all, summarize
from paramd.layout.types import TensorKind
from paramd.v1 import sidecar_pb2
from paramd_service.control.edits.machine import SameData, no_data
from paramd_service.control.mesh.view import listed

NAMES_TOLD = 100
MAX_MANIFEST_BYTES = 15 << 20
"""What fits into one message of gRPC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EditSpec:
    """An edit as it is asked for."""

    ops: tuple[OpSpec, ...]
    if_step: int | None = None
    allow_nonfinite: bool = False
    reset_moments: bool = False
    note: str = ""
    dry_run: bool = False

    @property
    def with_data(self) -> bool:
        """Whether operands are to be uploaded."""
        return any(one.data for one in self.ops)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """An edit that fits the layout."""

    manifest: sidecar_pb2.EditManifest
    digest: bytes
    ops: tuple[PlannedOp, ...]
    documents: list[dict[str, Any]]
    """Operations as documents tell them."""
    size_bytes: int
    share: float
    """Part of the model's parameters, 0 to 1."""


def plan_edit(
    index: NameIndex, spec: EditSpec, *, edit_id: str, epoch: int, layout_digest: str
) -> Planned:
    """The manifest and what documents say of it.

    Raises:
        UsageError, NotFoundError: it does not fit the layout.
    """
    parts = [(one, edit_ops(index, [one])) for one in spec.ops]
    ops = [op for _, found in parts for op in found]
    planned = check_ops(finder(index.layout), ops, allow_nonfinite=spec.allow_nonfinite)
    documents, begin = [], 0
    for word, found in parts:
        documents.append(_document(word, planned[begin : begin + len(found)]))
        begin += len(found)
    manifest = sidecar_pb2.EditManifest(
        edit_id=edit_id,
        epoch=epoch,
        layout_digest=layout_digest,
        ops=map(encode_op, ops),
        allow_nonfinite=spec.allow_nonfinite,
        reset_moments=spec.reset_moments,
        undoable=True,
        if_step=spec.if_step,
    )
    return _planned(index, manifest, planned, documents)


def plan_undo(
    index: NameIndex,
    done: sidecar_pb2.EditManifest,
    documents: Sequence[Mapping[str, Any]],
    *,
    edit_id: str,
) -> Planned:
    """The edit that undoes an applied one of the same epoch and layout."""
    manifest = sidecar_pb2.EditManifest(
        edit_id=edit_id,
        epoch=done.epoch,
        layout_digest=done.layout_digest,
        ops=done.ops,
        # It puts back what was there, whatever that was.
        allow_nonfinite=True,
        undoable=True,
        undo_of=done.edit_id,
    )
    return _planned(index, manifest, ops_of(index, done), [dict(one) for one in documents])


def ops_of(index: NameIndex, manifest: sidecar_pb2.EditManifest) -> tuple[PlannedOp, ...]:
    """The operations of a manifest that was planned on this layout."""
    return check_ops(finder(index.layout), decode_ops(manifest.ops), allow_nonfinite=True)


def same_data(index: NameIndex, ops: Sequence[PlannedOp]) -> SameData:
    """Says which ranks took different data where the layout wants them to take the same."""
    if not any(one.op.with_data for one in ops):
        return no_data
    keys = {edit.rank: _keys(edit) for edit in rank_edits(ops, range(index.layout.world_size))}

    def check(digests: Mapping[int, tuple[bytes, ...]]) -> str:
        first: dict[object, tuple[int, bytes]] = {}
        for rank in sorted(digests):
            found = digests[rank]
            if found and len(found) != len(ops):
                return f"rank {rank} tells {len(found)} digests of {len(ops)} operations"
            for number, digest in enumerate(found):
                key = keys[rank].get(number)
                if key is None or not ops[number].op.with_data:
                    continue
                other, expected = first.setdefault((number, key), (rank, digest))
                if digest != expected:
                    return (
                        f"ranks {listed([other, rank])} hold the same part of "
                        f"{ops[number].tensor.fqn!r} and were sent different data"
                    )
        return ""

    return check


def merged(
    index: NameIndex, ops: Sequence[PlannedOp], stats: Mapping[int, Sequence[Stats]]
) -> dict[str, Any] | None:
    """One document of all ranks' statistics by operation, replicas counted once."""
    keys = {edit.rank: _keys(edit) for edit in rank_edits(ops, sorted(stats))}
    seen: set[object] = set()
    parts: list[Stats] = []
    for rank in sorted(stats):
        for number, key in keys[rank].items():
            if (number, key) not in seen and number < len(stats[rank]):
                seen.add((number, key))
                parts.append(stats[rank][number])
    if not parts:
        return None
    found = summarize(merge_all(parts))
    shown = ("min", "max", "mean", "norm", "nan_count", "inf_count")
    return {name: value for name, value in found.document().items() if name in shown}


def _planned(
    index: NameIndex,
    manifest: sidecar_pb2.EditManifest,
    ops: tuple[PlannedOp, ...],
    documents: list[dict[str, Any]],
) -> Planned:
    if manifest.ByteSize() > MAX_MANIFEST_BYTES:
        raise UsageError(
            f"ops: the manifest is {manifest.ByteSize():,} bytes; expected at most "
            f"{MAX_MANIFEST_BYTES:,}: make several edits"
        )
    parameters = sum(
        tensor.numel for tensor in index.layout.tensors if tensor.kind is TensorKind.PARAMETER
    )
    return Planned(
        manifest=manifest,
        digest=manifest_digest(manifest),
        ops=ops,
        documents=documents,
        size_bytes=sum(one.box.numel * item_bytes(one.tensor.dtype) for one in ops),
        share=sum(one.box.numel for one in ops) / max(parameters, 1),
    )


def _document(spec: OpSpec, ops: Sequence[PlannedOp]) -> dict[str, Any]:
    return {
        "pattern": spec.pattern,
        "op": spec.op,
        **{name: getattr(spec, name) for name in NUMBERS},
        "data": spec.data,
        "names": [one.tensor.fqn for one in ops[:NAMES_TOLD]],
        "name_count": len(ops),
        "numel": sum(one.box.numel for one in ops),
    }


def _keys(edit: RankEdit) -> dict[int, object]:
    """For each operation that a rank takes part in what it has of it: equal for replicas."""
    found: dict[int, list[object]] = {}
    for item in edit.items:
        part = (item.sizes, item.source_begin, item.source_strides)
        found.setdefault(item.op, []).append(part)
    return {number: tuple(parts) for number, parts in found.items()}
