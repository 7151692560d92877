"""Samples what all ranks are doing, every few seconds, to find a slow rank, slow data or a hang.

Ranks that meet at every step have equal step times, so their reports alone cannot show this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from paramd_service.control.alerts.book import Finding, Severity
from paramd_service.control.alerts.config import Rule
from paramd_service.control.insight.verdict import WILFUL, Evidence, culprits, slowing, verdict_of

if TYPE_CHECKING:
    from paramd_service.control.alerts.watcher import Watcher

EVERY_S = 2.0
KEPT = 12
LEAST = 10
"""Samples of the last `KEPT` in which one rank must be slow, or all wait for data; among equal
ranks, chance picks another one each time."""
LEAST_OF_MANY = 7
"""The same of one rank of `MANY` or more, of which chance hardly picks the same one twice: a rank
that makes steps three times as long is seen alone in two samples of three."""
MANY = 8

STUCK_S = 15.0
"""Seconds that ranks must be seen at the same places before they are said to hang."""

RULES = frozenset({Rule.SLOW_RANK, Rule.STUCK})

Look = Callable[[], Awaitable[Sequence[Evidence]]]


class LookRounds:
    """Rounds of samples. Single event loop."""

    def __init__(self, watcher: Watcher, look: Look) -> None:
        """No I/O. Findings go to the watcher; `look` asks the sidecars."""
        self._watcher = watcher
        self._look = look
        self._looks: deque[Sequence[Evidence]] = deque(maxlen=KEPT)

    async def round(self) -> None:
        """Take one sample, and judge the last ones. A rank that fails raises nothing."""
        seen = await self._look()
        self._looks.append(seen)
        if not seen or any(one.gone or one.held for one in seen):
            self._looks.clear()
        findings = [one for one in self._found(seen) if self._watcher.config.looks_for(one.rule)]
        self._watcher.observe(findings, lambda alert: alert.rule in RULES)

    def _found(self, seen: Sequence[Evidence]) -> list[Finding]:
        if is_stuck(seen):
            return [_finding(Rule.STUCK, verdict_of(seen), culprits(seen), seen)]
        late = any(one.overdue and one.kind != "dataloader" for one in seen)
        least = LEAST_OF_MANY if len(seen) >= MANY else LEAST
        slow = slowing(self._looks, least=least, least_reading=LEAST) if not late else None
        return [_finding(Rule.SLOW_RANK, slow.text, slow.ranks, seen)] if slow is not None else []


def is_stuck(seen: Sequence[Evidence]) -> bool:
    """Whether ranks hang: stopped, or waiting in a collective that does not end. Where all are at
    work, as in an evaluation, or one is gone, which is told already, none is stuck."""
    if any(one.stopped for one in seen):
        return True
    late = [one for one in seen if one.overdue]
    waiting = [one for one in late if one.waits]
    busy = [one for one in late if not one.waits]
    if not waiting or any(one.gone for one in seen) or any(one.kind in WILFUL for one in busy):
        return False
    seen_s = [max(one.seen_for_s for one in waiting), *(one.seen_for_s for one in busy)]
    return min(seen_s) >= STUCK_S


def _finding(rule: Rule, reason: str, ranks: tuple[int, ...], seen: Sequence[Evidence]) -> Finding:
    return Finding(
        rule=rule,
        subject=f"rank {ranks[0]}" if len(ranks) == 1 else "mesh",
        severity=Severity.WARNING,
        reason=reason,
        ranks=ranks[:64],
        step=max(one.step for one in seen),
    )
