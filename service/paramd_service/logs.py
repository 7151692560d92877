"""Log lines of the control plane: one JSON object per line, without secrets.

Every line has time, level, logger and event; then job, incarnation, rank and step if the call gives
them (`extra=`), and the id of the current request. Sidecars write the same format with less
machinery (sidecar/log.py).
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from paramd.errors import request_id

FIELDS = ("job", "incarnation", "rank", "step")
"""Fields that `extra=` may add; any others are dropped."""
MAX_EVENT_CHARS = 4000
HIDDEN = "(hidden)"
QUIET = ("httpx2", "httpcore2", "asyncio", "alembic", "sqlalchemy")
"""Loggers silenced below WARNING: some log URLs, which may contain secrets."""

# User tokens, anything after "Bearer", signed tickets, and credentials in URLs.
_SECRETS = re.compile(
    r"pmd_[A-Za-z0-9_-]{20,}|(?<=[Bb]earer )[^\s'\"]+|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{20,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


class JsonFormatter(logging.Formatter):
    """Formats one record as one line of JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: tuple[str, ...] = ()

    def hide(self, *secrets: str) -> None:
        """Keep these texts out of every line from now on."""
        self._hidden = (*self._hidden, *(secret for secret in secrets if len(secret) >= 8))

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": self._clean(record.getMessage()[:MAX_EVENT_CHARS]),
        }
        for name in FIELDS:
            if hasattr(record, name):
                line[name] = getattr(record, name)
        serving = request_id.get()
        if serving:
            line["request_id"] = serving
        if record.exc_info:
            line["exception"] = self._clean(self.formatException(record.exc_info))
        return json.dumps(line, default=str)

    def _clean(self, text: str) -> str:
        for secret in self._hidden:
            text = text.replace(secret, HIDDEN)
        return without_secrets(text)


def without_secrets(line: str) -> str:
    """The line with tokens, tickets and credentials in URLs hidden, by their form or position.
    Other secrets that a script prints cannot be distinguished from text."""
    return _SECRETS.sub(HIDDEN, line)


def configure(*, level: str, stream: TextIO | None = None) -> JsonFormatter:
    """Send all log lines of this process to `stream`, standard error by default.

    Returns the formatter, whose `hide` takes secrets.

    Raises:
        ValueError: For an unknown level.
    """
    formatter = JsonFormatter()
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    return formatter
