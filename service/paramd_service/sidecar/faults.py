"""Named points where tests may kill or stop the sidecar. Inert without a setting.

PARAMD_FAULTS is a comma-separated list of `point:action[@n]`: at the n-th time (default
the first) that the point is passed the process kills (`kill`) or stops (`stop`) itself.

    PARAMD_FAULTS=copy-moved:kill@3,read-chunk:stop

Points: pin-prepared, copy-begun, copy-chunk, copy-moved, pin-answered, capture-ready,
boundary-copied, read-chunk, stats-item, mapped.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from paramd.errors import UsageError

POINTS = frozenset(
    {
        "pin-prepared",
        "copy-begun",
        "copy-chunk",
        "copy-moved",
        "pin-answered",
        "capture-ready",
        "boundary-copied",
        "read-chunk",
        "stats-item",
        "mapped",
    }
)
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_RULE = re.compile(r"(?P<point>[a-z-]+):(?P<action>kill|stop)(?:@(?P<count>[1-9][0-9]{0,8}))?")


def _signal_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@dataclass(slots=True)
class _Rule:
    signal: signal.Signals
    left: int


class Faults:
    """Knows the rules and counts the passes."""

    def __init__(
        self, text: str = "", *, act: Callable[[signal.Signals], None] = _signal_self
    ) -> None:
        self._act = act
        self._rules: dict[str, _Rule] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            found = _RULE.fullmatch(part)
            if found is None or found["point"] not in POINTS:
                raise UsageError(
                    f"PARAMD_FAULTS: {part!r}; expected point:kill or point:stop@n with a point "
                    f"of {', '.join(sorted(POINTS))}"
                )
            self._rules[found["point"]] = _Rule(
                _SIGNALS[found["action"]], int(found["count"] or "1")
            )

    def at(self, point: str) -> None:
        """Passes a named point."""
        if not self._rules:
            return
        rule = self._rules.get(point)
        if rule is None:
            return
        rule.left -= 1
        if rule.left == 0:
            del self._rules[point]
            self._act(rule.signal)
