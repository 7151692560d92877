"""Named points where tests can kill or stop a trainer. Inert unless configured.

PARAMD_TRAINER_FAULTS is a comma-separated list of `point:action[@n]`: the n-th time (default the
first) that the point is passed, the process kills (`kill`) or stops (`stop`) itself.
PARAMD_TRAINER_FAULTS_DIR names a directory where rules for one running rank can be placed, in
`<dir>/rank-<r>`; the file is removed once read, and replaces rules from an earlier one.

Points of edits: agreed (nothing is changed yet), applying (after the first record, SEQ is odd),
applied (fully, and the page says so). Points of attach: looked (what can be resumed is chosen),
opened (the sidecar is this trainer's), moved (parameters are in the arena).
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from paramd.errors import UsageError

ATTACH_POINTS = frozenset({"looked", "opened", "moved"})
POINTS = frozenset({"agreed", "applying", "applied"}) | ATTACH_POINTS
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_RULE = re.compile(r"(?P<point>[a-z-]+):(?P<action>kill|stop)(?:@(?P<count>[1-9][0-9]{0,8}))?")


def from_environment(rank: int) -> Callable[[str], None] | None:
    """The function to call at every point; None unless configured.

    Raises:
        UsageError: PARAMD_TRAINER_FAULTS is malformed (see the module docstring).
    """
    text = os.environ.get("PARAMD_TRAINER_FAULTS", "")
    folder = os.environ.get("PARAMD_TRAINER_FAULTS_DIR", "")
    if not text and not folder:
        return None
    given, told = _parsed(text), _parsed("")
    later = Path(folder, f"rank-{rank}") if folder else None

    def at_point(point: str) -> None:
        if later is not None and later.exists():
            told.clear()
            told.update(_parsed(later.read_text()))
            later.unlink()
        for rules in (told, given):
            if point not in rules:
                continue
            action, left = rules.pop(point)
            if left > 1:
                rules[point] = (action, left - 1)
                continue
            # To this thread: sent to the process, the signal may land some instructions later.
            signal.pthread_kill(threading.get_ident(), action)

    return at_point


def _parsed(text: str) -> dict[str, tuple[signal.Signals, int]]:
    rules = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _RULE.fullmatch(part)
        if found is None or found["point"] not in POINTS:
            raise UsageError(
                f"PARAMD_TRAINER_FAULTS: {part!r}; expected point:kill or point:stop@n with a "
                f"point of {', '.join(sorted(POINTS))}"
            )
        rules[found["point"]] = (_SIGNALS[found["action"]], int(found["count"] or "1"))
    return rules
