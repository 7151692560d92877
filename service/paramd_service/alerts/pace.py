"""How often values are sampled: as often as the measured cost allows. Pure.

A share of the time is paid in, and each sample's cost is paid out. The first samples come quickly,
on credit: without a past nothing can be judged. Later ones repay it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

SHARE = 0.001
"""Share of one core of each host, and of the training's time, that samples may cost."""
CREDIT_S = 2.0
"""Seconds of a core that may be spent ahead: what an hour pays in is nearly twice that."""
FIRST_S = 3.0
"""Seconds between two of the first samples."""
QUICK_COUNT = 10
"""Samples that come quickly at first."""
USUAL_S = 20.0
"""Least seconds between two of the later samples."""
LONGEST_S = 40.0
"""Longest seconds between two samples, while credit lasts."""
HURRY_S = 1.5
"""Seconds between two samples while the last one was odd."""
MAX_HURRIED = 20
"""Most samples in a row that are hurried."""
REPAYING = 2.0
"""How much rarer samples are while more has been spent than credit and share allow."""
PROBE_S = 80.0
"""Longest seconds between two samples before the costs of `LAST` are known: a start makes the first
ones dear, and by those alone nothing would be sampled for hours."""
LAST = 5
"""Samples by whose costs the next ones' is judged: by their median, because a single one is dearer
where it loads what it needs, or where the machine is busy."""


@dataclass(slots=True)
class Pace:
    """The rate of one kind of samples, by what they cost."""

    share: float = SHARE
    least_s: float = USUAL_S
    """Seconds between two samples that cost nothing."""
    costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    """What the last samples cost, in seconds of a core of the busiest host; not the first one."""
    count: int = 0
    spent_s: float = 0.0
    began_s: float | None = None
    hurried: int = 0

    def begin(self, now_s: float) -> None:
        """Begin to pay in."""
        self.began_s = now_s

    def paid(self, cost_s: float, *, made: bool = True) -> None:
        """An attempt has cost so much; `made`: it was a sample."""
        if made:
            self.count += 1
            if self.count == 1:
                # It loads what all of them need, as a start does.
                return
            self.costs_s.append(cost_s)
        self.spent_s += cost_s

    def later(self, cost_s: float) -> None:
        """The last attempt has made the training wait so much longer, as is known only now."""
        self.spent_s += cost_s
        if self.costs_s:
            self.costs_s[-1] += cost_s

    @property
    def cost_s(self) -> float:
        """What a sample costs; 0 while unknown."""
        return median_low(self.costs_s) if self.costs_s else 0.0

    def affordable_s(self) -> float:
        """Seconds between two samples that their share of the time pays for."""
        return max(self.least_s, self.cost_s / self.share)

    def every_s(self, now_s: float, *, hurry: bool = False) -> float:
        """Seconds until the next sample."""
        self.hurried = self.hurried + 1 if hurry else 0
        if hurry and self.hurried <= MAX_HURRIED and self._has_credit(now_s):
            return min(HURRY_S, self.least_s)
        return self.usual_s(now_s)

    def usual_s(self, now_s: float) -> float:
        """Seconds between two samples while nothing is odd."""
        if not self._has_credit(now_s):
            repaying_s = REPAYING * max(self.affordable_s(), LONGEST_S)
            return repaying_s if len(self.costs_s) == LAST else min(repaying_s, PROBE_S)
        if self.count < QUICK_COUNT:
            return min(FIRST_S, self.least_s)
        return min(self.affordable_s(), max(LONGEST_S, self.least_s))

    def _has_credit(self, now_s: float) -> bool:
        paid_s = self.share * (now_s - self.began_s) if self.began_s is not None else 0.0
        return self.spent_s + self.cost_s <= CREDIT_S + paid_s
