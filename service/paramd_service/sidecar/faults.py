"""Named points where tests kill or stop the sidecar (paramd/faults.py).

PARAMD_FAULTS has rules for all ranks. PARAMD_FAULTS_DIR names a directory for rules that are added
while a sidecar runs, in `<dir>/<socket's name>`, for example `rank-0.sock`.
"""

from __future__ import annotations

import os
from pathlib import Path

from paramd.faults import FaultRules

POINTS = frozenset((
    "pin-prepared", "copy-begun", "copy-chunk", "copy-moved", "copy-sent", "copy-received",
    "pin-answered", "capture-ready", "boundary-copied", "read-chunk", "stats-item", "pool",
    "mapped", "live", "state-allocated", "stream-granted", "stream-open", "stream-window",
    "export-begun", "export-file-begun", "export-chunk", "export-file-written",
    "export-file-done", "export-stored", "export-verify", "export-finish", "export-marker",
    "export-renamed", "export-dropped", "edit-staging", "edit-staged", "edit-ready",
    "edit-applied", "mark-made", "gradients-copied", "gradients-reduced", "standing-copied",
))  # fmt: skip


class Faults(FaultRules):
    """Fault rules of a sidecar."""

    points, variable = POINTS, "PARAMD_FAULTS"


def from_environment(socket_path: Path) -> Faults:
    """The fault rules for the sidecar that listens at `socket_path`.

    Raises:
        UsageError: If PARAMD_FAULTS is malformed.
    """
    folder = os.environ.get("PARAMD_FAULTS_DIR")
    later = Path(folder, socket_path.name) if folder else None
    return Faults(os.environ.get("PARAMD_FAULTS", ""), later=later)
