"""Looks at what all ranks are doing, every few seconds: a slow rank, slow data, a stuck training.

Where ranks meet at every step their step times are equal, so that reports alone cannot tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from paramd_service.control.alerts.book import Finding, Severity
from paramd_service.control.alerts.config import Rule
from paramd_service.control.insight.verdict import Evidence, culprits, slowing, verdict_of

if TYPE_CHECKING:
    from paramd_service.control.alerts.watcher import Watcher

EVERY_S = 2.0
KEPT = 12
LEAST = 10
"""Looks of those kept in which one rank is to be slow: of equal ranks, chance picks now one and now
another."""

RULES = frozenset({Rule.SLOW_RANK, Rule.STUCK})

Look = Callable[[], Awaitable[Sequence[Evidence]]]


class LookRounds:
    """Single event loop."""

    def __init__(self, watcher: Watcher, look: Look) -> None:
        """No I/O. What is found goes to the watcher; `look` asks the sidecars."""
        self._watcher = watcher
        self._look = look
        self._looks: deque[Sequence[Evidence]] = deque(maxlen=KEPT)

    async def round(self) -> None:
        """Look once, and judge the last looks. Never raises for a rank's sake."""
        seen = await self._look()
        self._looks.append(seen)
        if not seen or any(one.gone or one.held for one in seen):
            self._looks.clear()
        findings = [one for one in self._found(seen) if self._watcher.config.looks_for(one.rule)]
        self._watcher.observe(findings, lambda alert: alert.rule in RULES)

    def _found(self, seen: Sequence[Evidence]) -> list[Finding]:
        if any(one.stopped or one.overdue for one in seen):
            return [_finding(Rule.STUCK, verdict_of(seen), culprits(seen), seen)]
        slow = slowing(self._looks, least=LEAST)
        return [_finding(Rule.SLOW_RANK, slow.text, slow.ranks, seen)] if slow is not None else []


def _finding(rule: Rule, reason: str, ranks: tuple[int, ...], seen: Sequence[Evidence]) -> Finding:
    return Finding(
        rule=rule,
        subject=f"rank {ranks[0]}" if len(ranks) == 1 else "mesh",
        severity=Severity.WARNING,
        reason=reason,
        ranks=ranks[:64],
        step=max(one.step for one in seen),
    )
