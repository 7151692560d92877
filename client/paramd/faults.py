"""Fault injection: named points where tests kill or stop a process. Inert unless configured.

A variable has a comma-separated list of `point:action[@n]`: on the n-th pass of the point
(default: the first) the process kills (`kill`) or stops (`stop`) itself.

    PARAMD_FAULTS=copy-moved:kill@3,read-chunk:stop

Rules may also appear in a file while the process runs. It is deleted as it is read, so a restarted
process is not struck again. Each file replaces the rules of the one before; an empty one
clears them.
"""

from __future__ import annotations

import re
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paramd.errors import UsageError

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_RULE = re.compile(r"(?P<point>[a-z-]+):(?P<action>kill|stop)(?:@(?P<count>[1-9][0-9]{0,8}))?")


@dataclass(slots=True)
class _Rule:
    signal: signal.Signals
    left: int


class FaultRules:
    """Fault rules, with a count of passes per point."""

    points: ClassVar[frozenset[str]]
    variable: ClassVar[str]
    """The variable with the rules that a process begins with."""

    def __init__(self, text: str = "", *, later: Path | None = None) -> None:
        """`later`: file where further rules may appear; None: nowhere. Raises UsageError."""
        self._later = later
        self._given = self._parsed(text)
        self._told: dict[str, _Rule] = {}
        self._lock = threading.Lock()

    def at(self, point: str) -> None:
        """Pass a named point, on any thread; act on a rule that is due."""
        with self._lock:
            if self._later is not None:
                with suppress(FileNotFoundError):
                    told = self._later.read_text()
                    self._later.unlink()
                    self._told = self._parsed(told)
            due = [_passed(rules, point) for rules in (self._told, self._given)]
        for number in due:
            if number is not None:
                # To this thread: one to the process may be delivered some instructions later.
                signal.pthread_kill(threading.get_ident(), number)

    def _parsed(self, text: str) -> dict[str, _Rule]:
        rules = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            found = _RULE.fullmatch(part)
            if found is None or found["point"] not in self.points:
                raise UsageError(
                    f"{self.variable}: {part!r}; expected point:kill or point:stop@n with a point "
                    f"of {', '.join(sorted(self.points))}"
                )
            rules[found["point"]] = _Rule(_SIGNALS[found["action"]], int(found["count"] or "1"))
        return rules


def _passed(rules: dict[str, _Rule], point: str) -> signal.Signals | None:
    rule = rules.get(point)
    if rule is None:
        return None
    rule.left -= 1
    return rules.pop(point).signal if rule.left == 0 else None
