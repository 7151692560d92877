"""Samples what all ranks are doing, every few seconds, to find a slow rank, slow data or a hang.

Ranks that meet at every step have equal step times, so their reports alone cannot show this. What
counts is the time that the others wait for a rank: the share of samples in which it is elsewhere
while all others wait. A first suspicion is followed by more samples at once, until chance is
excluded.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paramd_service.alerts.book import Finding, Severity
from paramd_service.alerts.config import Rule
from paramd_service.control.mesh.evidence import (
    WILFUL,
    Evidence,
    Look,
    culprits,
    lone,
    ranks_text,
    verdict_of,
)

if TYPE_CHECKING:
    from paramd_service.alerts.watcher import Watcher

EVERY_S = 1.5
HURRY_S = 0.25
"""Seconds between two samples while one rank is suspected."""
MAX_HURRIED = 120
"""Samples in a row that are hurried; then chance is as good as excluded, or there was nothing."""
WINDOW_S = 60.0
"""Samples of this time are judged together."""
WINDOW_STEPS = 30
"""Where steps are long, samples of so many of them are: each says only once who was late."""

LEAST_SHARE = 0.15
"""Least share of the samples in which the others wait for a rank, beyond those in which it waits
for one of them: where steps vary by a fifth, ranks wait a tenth of the time."""
CLEAR_SHARE = 0.07
"""Share below which a rank that was slow no longer is."""
SIGMAS = 3.4
"""How far beyond chance it must be: among equal ranks each is waited for as often as others."""
SUSPECTED = 2
"""Steps with the same rank that make it suspected."""

DATA_SHARE = 0.55
"""Least share of the samples in which all ranks wait for data."""
DATA_LEAST = 8
"""Least number of them."""
LONG_STEPS = 3.0
"""A sample later than this many usual steps after the last boundary is of an evaluation or the
like, in which ranks may wait for one."""
SLACK_S = 1.0

STUCK_S = 15.0
"""Seconds that ranks must be seen at the same places before they are said to hang."""

RULES = frozenset({Rule.SLOW_RANK, Rule.STUCK})


@dataclass(frozen=True, slots=True)
class Seen:
    """One sample that counts."""

    at_s: float
    step: int
    alone: int
    """The rank that the others waited for; -1 for none."""
    what: str
    """What it was doing."""
    usual: tuple[str, ...]
    """What all ranks were doing, when they waited for none."""
    reading: bool
    """All ranks waited for data."""


@dataclass(frozen=True, slots=True)
class Slow:
    """What makes training slow."""

    ranks: tuple[int, ...]
    text: str


class Waits:
    """The samples of the last minute, and who was waited for in them. Pure but for its memory."""

    def __init__(self) -> None:
        self._seen: deque[Seen] = deque()
        self._steps: deque[tuple[float, int]] = deque(maxlen=60)
        """When the boundary before each step was seen to be, and the step."""
        self._slow: int = -1
        self._reads = False

    def clear(self) -> None:
        """Forget all: training stopped, was paused, or lost a rank."""
        self._seen.clear()
        self._steps.clear()
        self._slow, self._reads = -1, False

    def take(self, ranks: Sequence[Evidence], now_s: float) -> None:
        """Add a sample, unless it is of something long and deliberate."""
        usual_s = self.step_s()
        window_s = max(WINDOW_S, WINDOW_STEPS * usual_s)
        while self._seen and self._seen[0].at_s < now_s - window_s:
            self._seen.popleft()
        step = max(one.step for one in ranks)
        age_s = min((one.boundary_age_s for one in ranks), default=0.0)
        self._note(step, ranks, now_s)
        if usual_s > 0 and age_s > LONG_STEPS * usual_s + SLACK_S:
            return
        if any(one.kind in WILFUL for one in ranks):
            return
        alone = lone(ranks)
        usual = tuple(one.what for one in ranks) if alone is None else ()
        reading = bool(ranks) and all(one.kind == "dataloader" for one in ranks)
        self._seen.append(
            Seen(
                at_s=now_s,
                step=step,
                alone=alone.rank if alone is not None else -1,
                what=alone.what if alone is not None else "",
                usual=usual,
                reading=reading,
            )
        )

    def _note(self, step: int, ranks: Sequence[Evidence], now_s: float) -> None:
        """Note when the last boundary was, once for each step that is seen."""
        ages_s = [one.boundary_age_s for one in ranks if one.step == step]
        if self._steps and step < self._steps[-1][1]:
            # After a rollback they come again.
            self._steps.clear()
        if min(ages_s) >= 0 and (not self._steps or step > self._steps[-1][1]):
            self._steps.append((now_s - min(ages_s), step))

    def step_s(self) -> float:
        """The usual time of a step: the median over steps that were seen in succession, from
        boundary to boundary; 0 while unknown."""
        pairs = [
            (b[0] - a[0]) / (b[1] - a[1])
            for a, b in zip(self._steps, list(self._steps)[1:], strict=False)
        ]
        return median(pairs) if len(pairs) >= 3 else 0.0

    @property
    def suspicious(self) -> bool:
        """Whether more samples should follow at once."""
        counted = self._counts().most_common(1)
        if not counted or self._slow >= 0:
            return False
        count = counted[0][1]
        others = sum(self._counts().values()) - count
        return count >= SUSPECTED and count > 2 * others and len(self._seen) < 2 * MAX_HURRIED

    def _counts(self) -> Counter[int]:
        """In how many steps each rank was waited for, and more than others: several samples of one
        wait are no more sure than one."""
        steps: dict[int, Counter[int]] = {}
        for one in self._seen:
            if one.alone >= 0:
                steps.setdefault(one.step, Counter())[one.alone] += 1
        found: Counter[int] = Counter()
        for counts in steps.values():
            (rank, most), *others = counts.most_common(2)
            if not others or others[0][1] < most:
                found[rank] += 1
        return found

    def slow(self, ranks: Sequence[int]) -> Slow | None:
        """What slows training; None for nothing."""
        count = len(self._seen)
        if not count:
            return None
        found = self._slow_rank(count, ranks)
        return found if found is not None else self._slow_data(count, ranks)

    def _slow_rank(self, count: int, ranks: Sequence[int]) -> Slow | None:
        counts = self._counts()
        if not counts:
            self._slow = -1
            return None
        rank, steps = counts.most_common(1)[0]
        samples = Counter(one.alone for one in self._seen if one.alone >= 0)
        waited = samples.pop(rank)
        ahead = waited - max(samples.values(), default=0)
        # Of many ranks each is the last one now and then: what counts is one rank against the
        # next.
        other = max((of for one, of in counts.items() if one != rank), default=0)
        sure = steps - other >= SIGMAS * math.sqrt(steps + other)
        least = CLEAR_SHARE if rank == self._slow else LEAST_SHARE
        if ahead < least * count or not (sure or rank == self._slow):
            self._slow = -1
            return None
        self._slow = rank
        others = ranks_text(one for one in ranks if one != rank)
        share = 100 * waited / count
        text = (
            f"rank {rank} is slow: {others} waited for it {share:.0f} % of the time "
            f"({waited} of {count} samples), mostly while it was {self._what(rank)}"
        )
        return Slow((rank,), text)

    def _what(self, rank: int) -> str:
        """What a rank does, while others wait for it, more than ranks do anyhow: training is mostly
        in a forward, also where reading makes a rank late."""
        late = Counter(one.what for one in self._seen if one.alone == rank)
        usual = Counter(what for one in self._seen for what in one.usual)
        shares = {what: of / usual.total() for what, of in usual.items()}
        return max(late, key=lambda what: late[what] - late.total() * shares.get(what, 0.0))

    def _slow_data(self, count: int, ranks: Sequence[int]) -> Slow | None:
        reading = sum(one.reading for one in self._seen)
        least = DATA_SHARE if not self._reads else DATA_SHARE / 2
        self._reads = reading >= DATA_LEAST and reading >= least * count
        if not self._reads:
            return None
        text = (
            f"{ranks_text(ranks)} waited for data {100 * reading / count:.0f} % of the time "
            f"({reading} of {count} samples): reading it slows training"
        )
        return Slow(tuple(ranks), text)


class LookRounds:
    """Rounds of samples. Single event loop."""

    def __init__(
        self, watcher: Watcher, look: Look, clock: Callable[[], float] | None = None
    ) -> None:
        """No I/O. Findings go to the watcher; `look` asks the sidecars."""
        self._watcher = watcher
        self._look = look
        self._clock = clock if clock is not None else watcher.clock
        self._waits = Waits()
        self._hurried = 0
        self.every_s = EVERY_S

    def next_s(self) -> float:
        """Seconds until the next sample; random, so as not to be in step with the training."""
        hurry = self._waits.suspicious and self._hurried < MAX_HURRIED
        self._hurried = self._hurried + 1 if hurry else 0
        return (HURRY_S if hurry else EVERY_S) * (0.75 + 0.5 * random.random())

    async def round(self) -> None:
        """Take one sample, and judge the last ones. A rank that fails raises nothing."""
        seen = await self._look()
        if not seen or any(one.gone or one.held for one in seen):
            self._waits.clear()
        else:
            self._waits.take(seen, self._clock())
        findings = [one for one in self._found(seen) if self._watcher.config.looks_for(one.rule)]
        self._watcher.observe(findings, lambda alert: alert.rule in RULES)

    def _found(self, seen: Sequence[Evidence]) -> list[Finding]:
        if is_stuck(seen):
            return [_finding(Rule.STUCK, verdict_of(seen), culprits(seen), seen)]
        late = any(one.overdue and one.kind != "dataloader" for one in seen)
        slow = self._waits.slow([one.rank for one in seen]) if seen and not late else None
        if slow is None:
            return []
        return [_finding(Rule.SLOW_RANK, self._explained(slow), slow.ranks, seen)]

    def _explained(self, slow: Slow) -> str:
        """What is slow, and what can be seen of why on the host of the slow rank."""
        if len(slow.ranks) != 1:
            return slow.text
        why = self._watcher.why_slow(slow.ranks[0])
        return f"{slow.text}; on its host: {why}" if why else slow.text


def is_stuck(seen: Sequence[Evidence]) -> bool:
    """Whether ranks hang: stopped, or waiting in a collective that does not end. Where all are at
    work, as in an evaluation, none is stuck; nor if one is gone, for which there is an alert of its
    own. A rank whose script ran to its end has none, so others that wait for it are stuck."""
    if any(one.stopped for one in seen):
        return True
    late = [one for one in seen if one.overdue]
    waiting = [one for one in late if one.waits]
    busy = [one for one in late if not one.waits]
    told = any(one.gone and not one.ended_well for one in seen)
    if not waiting or told or any(one.kind in WILFUL for one in busy):
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
