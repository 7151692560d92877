"""Edit requests -> manifest, documents and replica check; limits of edits.

Limits come from [edits] in paramd.toml, overridden by PARAMD_EDITS (JSON).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from paramd.errors import ExhaustedError, UsageError
from paramd.layout.dtypes import item_bytes
from paramd.layout.edits.kinds import numbers_of
from paramd.layout.edits.ops import EditTerms, OpSpec, edit_ops, manifest_digest, manifest_of
from paramd.layout.edits.plan import PlannedOp, RankEdit, check_ops, finder, rank_edits
from paramd.layout.select import NameIndex
from paramd.layout.stats import Stats, merge_all, summarize
from paramd.layout.types import TensorKind
from paramd.v1 import sidecar_pb2
from paramd_service.control.base.config import settings_of, table_of_file, table_of_text
from paramd_service.control.mesh.registry import listed
from paramd_service.edits.machine import SameData, no_data

ENVIRONMENT = "PARAMD_EDITS"
NAMES_TOLD = 100
MAX_MANIFEST_BYTES = 15 << 20
"""A manifest must fit into one gRPC message."""
_MINUTE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class EditConfig:
    """Limits of edits, per job."""

    max_share: float = 1.0
    """Largest fraction of the model's parameters that one edit may change, in (0, 1]."""
    max_per_minute: int = 6000
    """Edits that may be created in any minute, 1 or more."""
    agree_s: float = 60.0
    """Seconds, beyond four steps, that the trainers have to agree on an edit or pause before it is
    withdrawn; above 0."""
    staged_s: float = 600.0
    """Seconds after which an uncommitted edit is aborted; above 0."""
    range_s: float = 0.2
    """Seconds an edit waits for the before and after statistics in the audit; 0 collects none."""
    range_bytes: int = 16 << 20
    """Edits larger than this get no such statistics; 0 or more."""

    def __post_init__(self) -> None:
        if not 0 < self.max_share <= 1:
            raise UsageError(f"max_share: {self.max_share}; expected above 0 and at most 1")
        if self.max_per_minute < 1:
            raise UsageError(f"max_per_minute: {self.max_per_minute}; expected 1 or more")
        for name in ("agree_s", "staged_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}: {getattr(self, name)}; expected above 0")
        for name in ("range_s", "range_bytes"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name}: {getattr(self, name)}; expected 0 or more")


class Pace:
    """Rate limit over a sliding minute. The caller supplies the clock."""

    def __init__(self, max_per_minute: int) -> None:
        self._begun: deque[float] = deque(maxlen=max_per_minute)

    def take(self, now_s: float) -> None:
        """Count one edit.

        Raises:
            ExhaustedError: When the last minute's limit is reached.
        """
        most = self._begun.maxlen
        if len(self._begun) == most and self._begun[0] > now_s - _MINUTE_S:
            wait_s = self._begun[0] + _MINUTE_S - now_s
            raise ExhaustedError(
                f"this control plane accepts at most {most:,} edits per minute "
                f"([edits] max_per_minute); wait {wait_s:.0f} s, or combine several edits"
            )
        self._begun.append(now_s)


_settings = partial(settings_of, kind=EditConfig, name="edits")


def load_edits(files: Sequence[tuple[Path, bool]], environment: Mapping[str, str]) -> EditConfig:
    """Load the limits from paramd.toml files, (path, is_own) each; earlier ones win.

    Files that are not the user's own are ignored: they could lift limits.

    Raises:
        UsageError: For a source that is unreadable or a value out of range.
    """
    merged: dict[str, Any] = {}
    for path in [path for path, is_own in reversed(files) if is_own]:
        merged |= _settings(table_of_file(path, "edits"), place=f"{path}: [edits]")
    table = table_of_text(environment.get(ENVIRONMENT, ""), ENVIRONMENT)
    return EditConfig(**merged | _settings(table, place=ENVIRONMENT))


@dataclass(frozen=True, kw_only=True, slots=True)
class EditSpec(EditTerms):
    ops: tuple[OpSpec, ...]

    @property
    def with_data(self) -> bool:
        """Whether any op takes uploaded data."""
        return any(one.data for one in self.ops)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """An edit checked against the layout."""

    manifest: sidecar_pb2.EditManifest
    digest: bytes
    ops: tuple[PlannedOp, ...]
    documents: list[dict[str, Any]]
    """The ops as REST documents show them."""
    size_bytes: int
    share: float
    """Fraction of the model's parameters that it changes, 0 to 1."""


def plan_edit(
    index: NameIndex, spec: EditSpec, *, edit_id: str, incarnation: int, layout_digest: str
) -> Planned:
    """Plan a request against the layout.

    Raises:
        UsageError, NotFoundError: It does not fit the layout, or the manifest is too large.
    """
    parts = [(one, edit_ops(index, [one])) for one in spec.ops]
    ops = [op for _, found in parts for op in found]
    planned = check_ops(finder(index.layout), ops, allow_nonfinite=spec.allow_nonfinite)
    left = iter(planned)
    documents = [_document(word, list(islice(left, len(found)))) for word, found in parts]
    manifest = manifest_of(edit_id, ops, spec, incarnation=incarnation, layout_digest=layout_digest)
    return _planned(index, manifest, planned, documents)


def plan_undo(
    index: NameIndex,
    done: sidecar_pb2.EditManifest,
    documents: Sequence[Mapping[str, Any]],
    *,
    edit_id: str,
) -> Planned:
    """Plan the undo of an edit applied in the same incarnation and layout."""
    manifest = sidecar_pb2.EditManifest.FromString(done.SerializeToString())
    manifest.edit_id, manifest.undo_of, manifest.undoable = edit_id, done.edit_id, True
    # The undo restores the previous values, which may have been NaN or infinite.
    manifest.allow_nonfinite = True
    manifest.ClearField("if_step")
    manifest.ClearField("reset_moments")
    return _planned(index, manifest, ops_of(index, done), [dict(one) for one in documents])


def plan_whole(
    index: NameIndex, manifest: sidecar_pb2.EditManifest, size_bytes: int = 0
) -> Planned:
    """Plan an edit without ops: of hyper-parameters, or a rollback to a state of `size_bytes`."""
    return replace(_planned(index, manifest, (), []), size_bytes=size_bytes)


def ops_of(index: NameIndex, manifest: sidecar_pb2.EditManifest) -> tuple[PlannedOp, ...]:
    if not manifest.ops:
        return ()
    return check_ops(finder(index.layout), manifest.ops, allow_nonfinite=True)


def same_data(index: NameIndex, ops: Sequence[PlannedOp]) -> SameData:
    """Build the check that replicas of a piece staged the same data."""
    if not any(one.op.with_data for one in ops):
        return no_data
    keys = {edit.rank: _keys(edit) for edit in rank_edits(ops, range(index.layout.world_size))}

    def check(digests: Mapping[int, tuple[bytes, ...]]) -> str:
        first: dict[object, tuple[int, bytes]] = {}
        for rank in sorted(digests):
            found = digests[rank]
            if found and len(found) != len(ops):
                return f"rank {rank} sent {len(found)} digests for {len(ops)} operations"
            for number, digest in enumerate(found):
                key = keys[rank].get(number)
                if key is None or not ops[number].op.with_data:
                    continue
                other, expected = first.setdefault((number, key), (rank, digest))
                if digest != expected:
                    return (
                        f"ranks {listed([other, rank])} hold the same region of "
                        f"{ops[number].tensor.fqn!r} but were sent different data"
                    )
        return ""

    return check


def merged(
    index: NameIndex, ops: Sequence[PlannedOp], stats: Mapping[int, Sequence[Stats]]
) -> dict[str, Any] | None:
    """Merge per-rank, per-op statistics into one document, counting replicas once."""
    parts = [next(iter(held.values())) for held in _by_part(index, ops, stats).values()]
    if not parts:
        return None
    found = summarize(merge_all(parts))
    shown = ("min", "max", "mean", "norm", "nan_count", "inf_count")
    return {name: value for name, value in found.document().items() if name in shown}


def replicas_text(
    index: NameIndex, ops: Sequence[PlannedOp], stats: Mapping[int, Sequence[Stats]]
) -> str:
    """Which replicas differ from each other, as their statistics show; empty if none do."""
    for (number, _), held in _by_part(index, ops, stats).items():
        if len(set(held.values())) > 1:
            return (
                f"the replicas of {ops[number].tensor.fqn!r} on ranks {listed(sorted(held))} had "
                "different values; each was edited from its own"
            )
    return ""


def _by_part(
    index: NameIndex, ops: Sequence[PlannedOp], stats: Mapping[int, Sequence[Stats]]
) -> dict[tuple[int, object], dict[int, Stats]]:
    """Statistics by op and part, of each rank that holds it."""
    found: dict[tuple[int, object], dict[int, Stats]] = {}
    for edit in rank_edits(ops, sorted(stats)):
        for number, key in _keys(edit).items():
            if number < len(stats[edit.rank]):
                found.setdefault((number, key), {})[edit.rank] = stats[edit.rank][number]
    return found


def _planned(
    index: NameIndex,
    manifest: sidecar_pb2.EditManifest,
    ops: tuple[PlannedOp, ...],
    documents: list[dict[str, Any]],
) -> Planned:
    if manifest.ByteSize() > MAX_MANIFEST_BYTES:
        raise UsageError(
            f"ops: the manifest is {manifest.ByteSize():,} bytes; expected at most "
            f"{MAX_MANIFEST_BYTES:,}; split it into several edits"
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
        **numbers_of(spec),
        "data": spec.data,
        "names": [one.tensor.fqn for one in ops[:NAMES_TOLD]],
        "name_count": len(ops),
        "numel": sum(one.box.numel for one in ops),
    }


def _keys(edit: RankEdit) -> dict[int, object]:
    """The part of each op that a rank applies, by op number; replicas have equal values."""
    found: dict[int, list[object]] = {}
    for item in edit.items:
        part = (item.sizes, item.source_begin, item.source_strides)
        found.setdefault(item.op, []).append(part)
    return {number: tuple(parts) for number, parts in found.items()}
