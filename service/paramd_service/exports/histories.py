"""Which exports lie on the way to the present state. Pure.

A rollback abandons the steps made since the state it restores: their exports belong to a history
that the training has left, however high their step. Within an incarnation, a history's number is
the number of rollbacks before it, undone ones included, as in `paramd.state.StateName`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from paramd.memory.edit_program import branch_of
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.control.store.edits import EditRow


@dataclass(frozen=True, slots=True)
class _History:
    """One history: the history that it continues, and up to which step."""

    lineage: int
    """Word LINEAGE in it; 0 for the history at the incarnation's beginning."""
    before: int = -1
    """Number of the history that it continues; -1: none."""
    step: float = inf


def is_on_the_way(step: int, edits: int, rollbacks: Sequence[EditRow]) -> bool:
    """Whether a state, given by its step and its number of edits, lies on the way to the last one
    of its incarnation. `rollbacks` are all that were applied in it, undos included, in order."""
    known = _histories(rollbacks)
    # The number of the state's history is the number of rollbacks before the state.
    wanted = sum(row.edits <= edits for row in rollbacks)
    at, limit = len(known) - 1, inf
    while at > wanted:
        at, limit = known[at].before, min(limit, known[at].step)
    return at == wanted and step <= limit


def _histories(rollbacks: Sequence[EditRow]) -> list[_History]:
    found = [_History(0)]
    numbers = {row.id: number for number, row in enumerate(rollbacks, start=1)}
    for row in rollbacks:
        undone = numbers.get(row.undo_of, 0)
        if undone:
            # The history that the undone rollback left continues.
            found.append(_History(found[undone - 1].lineage, undone - 1))
            continue
        target = pb.EditManifest.FromString(row.manifest).rollback
        of = [number for number, one in enumerate(found) if one.lineage == target.lineage]
        # A lineage that no rollback began is that of the incarnation's beginning.
        of = of if of else [number for number, one in enumerate(found) if not one.lineage]
        found.append(_History(branch_of(row.token), of[-1], target.step))
    return found
