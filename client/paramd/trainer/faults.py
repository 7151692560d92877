"""Named points where tests can kill or stop a trainer (paramd/faults.py).

PARAMD_TRAINER_FAULTS has rules for all ranks. PARAMD_TRAINER_FAULTS_DIR names a directory where
rules for one running rank can be placed, in `<dir>/rank-<r>`.

Points of edits: agreed (nothing is changed yet), applying (after the first record, SEQ is odd),
applied (fully, and the page says so). Points of attach: looked (what can be resumed is chosen),
opened (the sidecar is this trainer's), moved (parameters are in the arena).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from paramd.faults import FaultRules

ATTACH_POINTS = frozenset({"looked", "opened", "moved"})
POINTS = frozenset({"agreed", "applying", "applied"}) | ATTACH_POINTS


class Faults(FaultRules):
    """Fault rules of a trainer."""

    points, variable = POINTS, "PARAMD_TRAINER_FAULTS"


def from_environment(rank: int) -> Callable[[str], None] | None:
    """The function to call at every point; None unless configured. UsageError: malformed rules."""
    text = os.environ.get("PARAMD_TRAINER_FAULTS", "")
    folder = os.environ.get("PARAMD_TRAINER_FAULTS_DIR", "")
    if not text and not folder:
        return None
    return Faults(text, later=Path(folder, f"rank-{rank}") if folder else None).at
