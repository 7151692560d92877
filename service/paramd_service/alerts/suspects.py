"""Which change may have caused a finding: one that was applied, touches what the finding is about
and came within a few of its samples before.

Only rules of values have suspects: no edit kills a process, delays a copy or fills a disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramd.layout.edits.ops import EditState
from paramd.mesh.insight.reports import Suspect
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.alerts.book import Finding
from paramd_service.alerts.config import Rule
from paramd_service.control.store.edits import EditRow

OF_VALUES = frozenset({Rule.NON_FINITE, Rule.NORM_JUMP, Rule.GRADIENT_JUMP, Rule.LOGGED_NUMBER})
"""Rules whose findings an edit can cause."""

FEW = 3
"""Samples before the first odd one within which a change is suspected."""
UNKNOWN_S = 120.0
"""The same in seconds, where fewer samples are known: three at the usual rate."""
KEPT = 32
"""Applied edits remembered of a run."""
MAX_NAMES = 2000
"""An edit of more tensors counts as one of all."""
_OPS_TOLD = 3


def onset_of(steps: Iterable[int], first: int, few: int = FEW) -> tuple[int, int]:
    """Steps between which the cause of a finding lies: from `few` samples before the first one
    that shows it, of step `first`, to that one. `steps` of the samples, oldest first; the begin is
    -1 when too few are known."""
    before = [step for step in steps if step < first]
    return (before[-few] if len(before) >= few else -1), first


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An edit that was applied, as far as it can be a cause."""

    id: str
    what: str
    """In words, without the operands: alerts tell no values."""
    actor: str
    step: int
    edits: int
    """Number of the edit in the run's history, which orders those of one step."""
    undo_of: str
    applied_s: float
    names: frozenset[str] | None
    """Tensors that it changes; None: all, as learning rates and rollbacks do."""

    @classmethod
    def of(cls, row: EditRow) -> Change:
        """What is remembered of an applied edit."""
        return cls(
            id=row.id,
            what=_what(row),
            actor=row.actor,
            step=row.step,
            edits=row.edits,
            undo_of=row.undo_of,
            applied_s=row.ended_s if row.ended_s is not None else row.created_s,
            names=_names(row),
        )

    def touches(self, finding: Finding) -> bool:
        """Whether it changes a tensor of the finding; one without a tensor is about all of them."""
        if self.names is None or not finding.fqn:
            return True
        return not self.names.isdisjoint((finding.fqn, *finding.others))


class Changes:
    """The last edits that were applied in one run."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._last: deque[Change] = deque(maxlen=KEPT)

    def add(self, rows: Iterable[EditRow]) -> None:
        """Remember edits, oldest first. Those of other runs, and those that were not applied, are
        no causes."""
        for row in rows:
            known = any(one.id == row.id for one in self._last)
            applied = row.state == EditState.APPLIED and row.incarnation == self._incarnation
            if applied and not known:
                self._last.append(Change.of(row))

    def suspect(self, finding: Finding, now_s: float) -> Suspect | None:
        """The newest change that may have caused the finding; None when there is none."""
        if finding.rule not in OF_VALUES or finding.onset is None:
            return None
        after, shown = finding.onset
        near = [
            one
            for one in self._last
            if after <= one.step <= shown and (after >= 0 or one.applied_s >= now_s - UNKNOWN_S)
        ]
        # What was undone before the finding showed has no effect any more.
        undone = {one.undo_of for one in near}
        found = [one for one in near if one.id not in undone and one.touches(finding)]
        if not found:
            return None
        newest = max(found, key=lambda one: (one.step, one.edits))
        return Suspect(
            edit=newest.id,
            what=newest.what,
            actor=newest.actor,
            step=newest.step,
            steps_before=shown - newest.step,
        )


def _names(row: EditRow) -> frozenset[str] | None:
    ops: Sequence[Mapping[str, Any]] = row.detail.get("ops", ())
    if not ops or sum(int(op["name_count"]) for op in ops) > MAX_NAMES:
        return None
    return frozenset(op.fqn for op in pb.EditManifest.FromString(row.manifest).ops)


def _what(row: EditRow) -> str:
    detail = row.detail
    if row.undo_of:
        return f"undo of edit {row.undo_of[:8]}"
    if rollback := detail.get("rollback"):
        point = f"restore point {rollback['mark']}, " if rollback["mark"] else ""
        return f"rollback to {point}step {rollback['step']}"
    if change := detail.get("hyperparameters"):
        values = ", ".join(f"{name}={value}" for name, value in change["values"].items())
        return f"optimizer {change['optimizer']} group {change['group']}: {values}"
    ops: Sequence[Mapping[str, Any]] = detail.get("ops", ())
    told = ", ".join(f"{op['op']} {op['pattern']}" for op in ops[:_OPS_TOLD])
    return f"{told} ..." if len(ops) > _OPS_TOLD else told
