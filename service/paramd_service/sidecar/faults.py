"""Fault injection: named points where tests kill or stop the sidecar. Inert unless configured.

PARAMD_FAULTS is a comma-separated list of `point:action[@n]`: on the n-th pass of the point
(default: the first) the process kills (`kill`) or stops (`stop`) itself.

    PARAMD_FAULTS=copy-moved:kill@3,read-chunk:stop

PARAMD_FAULTS_DIR names a directory for rules that are added while a sidecar runs, in
`<dir>/<socket's name>`, for example `rank-0.sock`. The file is deleted as it is read, so a
respawned sidecar is not struck again. Each file replaces the rules of the one before; an empty
one clears them.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paramd.errors import UsageError

POINTS = frozenset((
    "pin-prepared", "copy-begun", "copy-chunk", "copy-moved", "copy-sent", "copy-received",
    "pin-answered", "capture-ready", "boundary-copied", "read-chunk", "stats-item", "pool",
    "mapped", "live", "state-allocated", "stream-granted", "stream-open", "stream-window",
    "export-begun", "export-file-begun", "export-chunk", "export-file-written",
    "export-file-done", "export-stored", "export-verify", "export-finish", "export-marker",
    "export-renamed", "export-dropped", "edit-staging", "edit-staged", "edit-ready",
    "edit-applied", "mark-made", "gradients-copied", "gradients-reduced", "standing-copied",
))  # fmt: skip
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_RULE = re.compile(r"(?P<point>[a-z-]+):(?P<action>kill|stop)(?:@(?P<count>[1-9][0-9]{0,8}))?")


@dataclass(slots=True)
class _Rule:
    signal: signal.Signals
    left: int


class Faults:
    """Fault rules, with a count of passes per point."""

    def __init__(self, text: str = "", *, later: Path | None = None) -> None:
        """`later`: file where further rules may appear; None: nowhere."""
        self._later = later
        self._given = _parse(text)
        self._told: dict[str, _Rule] = {}
        self._lock = threading.Lock()

    def at(self, point: str) -> None:
        """Pass a named point, on any thread; act on a rule that is due."""
        with self._lock:
            if self._later is not None:
                with suppress(FileNotFoundError):
                    told = self._later.read_text()
                    self._later.unlink()
                    self._told = _parse(told)
            due = [_passed(rules, point) for rules in (self._told, self._given)]
        for number in due:
            if number is not None:
                # To this thread: one to the process may be delivered some instructions later.
                signal.pthread_kill(threading.get_ident(), number)


def _passed(rules: dict[str, _Rule], point: str) -> signal.Signals | None:
    """Count a pass; the signal of the rule that is due with it."""
    rule = rules.get(point)
    if rule is None:
        return None
    rule.left -= 1
    return rules.pop(point).signal if rule.left == 0 else None


def from_environment(socket_path: Path) -> Faults:
    """The fault rules for the sidecar that listens at `socket_path`.

    Raises:
        UsageError: PARAMD_FAULTS is malformed.
    """
    folder = os.environ.get("PARAMD_FAULTS_DIR")
    later = Path(folder, socket_path.name) if folder else None
    return Faults(os.environ.get("PARAMD_FAULTS", ""), later=later)


def _parse(text: str) -> dict[str, _Rule]:
    rules = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _RULE.fullmatch(part)
        if found is None or found["point"] not in POINTS:
            raise UsageError(
                f"PARAMD_FAULTS: {part!r}; expected point:kill or point:stop@n with a point "
                f"of {', '.join(sorted(POINTS))}"
            )
        rules[found["point"]] = _Rule(_SIGNALS[found["action"]], int(found["count"] or "1"))
    return rules
