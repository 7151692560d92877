"""Samples what all ranks are doing, every few seconds, to find a slow rank, slow data or a hang.

Ranks that meet at every step have equal step times, so their reports alone cannot show this.
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
"""Samples of the last `KEPT` in which one rank must be slow; among equal ranks, chance picks
another one each time."""

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
