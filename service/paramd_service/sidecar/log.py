"""Log lines as JSON on standard error.

No logging framework: structlog costs 5.5 MiB and a third of the start time (docs/decisions.md).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO


@dataclass(frozen=True, kw_only=True)
class Log:
    """Writes one JSON object per line. Never pass it tickets or secrets."""

    fields: dict[str, Any]
    """Included in every line."""
    live: Callable[[], Mapping[str, Any]] = dict
    """Fields evaluated for each line: incarnation, step."""
    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def __call__(self, event: str, **fields: object) -> None:
        line = {"time": round(time.time(), 3), "event": event}
        line |= {**self.fields, **self.live(), **fields}
        try:
            self.stream.write(json.dumps(line, default=str) + "\n")
            self.stream.flush()
        except (OSError, ValueError):
            pass  # stderr is closed; keep serving
