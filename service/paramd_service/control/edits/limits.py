"""How much may be edited: [edits] of paramd.toml, and PARAMD_EDITS as JSON over it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paramd.errors import ExhaustedError, UsageError
from paramd_service.control.base.config import table_of_file, table_of_text

ENVIRONMENT = "PARAMD_EDITS"
_MINUTE_S = 60.0

log = logging.getLogger("paramd.control.edits")


@dataclass(frozen=True, kw_only=True)
class EditConfig:
    """Limits of edits, for each job."""

    max_share: float = 1.0
    """Largest part of the model's parameters that one edit may change, above 0, at most 1."""
    max_per_minute: int = 6000
    """Edits that may be created in any minute, 1 or more."""
    agree_s: float = 60.0
    """Time for the trainers to agree on an edit or a hold, beside four of their steps, in
    seconds, above 0; then it is withdrawn."""
    staged_s: float = 600.0
    """An edit that nobody commits is aborted after this long, in seconds, above 0."""
    range_s: float = 0.2
    """How long an edit waits for the statistics before and after it, which the audit shows when
    they are there in time, in seconds, 0 or more; 0 asks for none."""
    range_bytes: int = 16 << 20
    """Edits of more bytes than this are made without them, 0 or more."""

    def __post_init__(self) -> None:
        if not 0 < self.max_share <= 1:
            raise UsageError(f"max_share: {self.max_share}; expected above 0 and at most 1")
        if self.max_per_minute < 1:
            raise UsageError(f"max_per_minute: {self.max_per_minute}; expected 1 or more")
        for name in ("agree_s", "staged_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}: {getattr(self, name)}; expected above 0")
        for name in ("range_s", "range_bytes"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name}: {getattr(self, name)}; expected 0 or more")


class Pace:
    """Counts what was begun in the last minute. The clock is the caller's."""

    def __init__(self, max_per_minute: int) -> None:
        self._max = max_per_minute
        self._begun: deque[float] = deque()

    def take(self, now_s: float) -> None:
        """Counts one. Raises ExhaustedError when there were too many in the last minute."""
        while self._begun and self._begun[0] <= now_s - _MINUTE_S:
            self._begun.popleft()
        if len(self._begun) >= self._max:
            wait_s = self._begun[0] + _MINUTE_S - now_s
            raise ExhaustedError(
                f"{self._max:,} edits a minute is the limit of this control plane "
                f"([edits] max_per_minute); wait {wait_s:.0f} s, or put more into one edit"
            )
        self._begun.append(now_s)


def load_edits(
    files: Sequence[tuple[Path, bool]], environment: Mapping[str, str], *, strict: bool
) -> EditConfig:
    """The config in force. Unless `strict` one that cannot be right is logged and left out.

    Args:
        files: paramd.toml files, the first one wins, and whether each is the user's own; a
            foreign one is not looked at, for it could lift limits.

    Raises:
        UsageError: something cannot be read or is out of range, and `strict`.
    """
    try:
        merged: dict[str, Any] = {}
        for path in [path for path, is_own in reversed(files) if is_own]:
            merged |= _checked(table_of_file(path, "edits"), place=f"{path}: [edits]")
        table = table_of_text(environment.get(ENVIRONMENT, ""), ENVIRONMENT)
        merged |= _checked(table, place=ENVIRONMENT)
        return EditConfig(**merged)
    except UsageError as error:
        if strict:
            raise
        log.error("the limits of edits are the default ones: %s", error)
        return EditConfig()


def _checked(table: Mapping[str, Any], *, place: str) -> Mapping[str, Any]:
    kinds = {field.name: field for field in fields(EditConfig)}
    for key, value in table.items():
        if key not in kinds:
            raise UsageError(f"{place}: unknown key {key!r}; expected some of {', '.join(kinds)}")
        wanted = int if isinstance(kinds[key].default, int) else int | float
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise UsageError(f"{place}: {key} is {value!r}; expected a number")
    return table
