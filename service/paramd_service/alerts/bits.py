"""Compares every bit of every replica once in n steps: parameters and optimizer state.

The state that must be equal is cut into parts of `sample_bytes`, spread evenly over the n steps.
Each part is pinned at one future step on all its ranks, so all digests are of one state and a bit
is named as it was there. A step that was missed is requested again, further ahead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paramd.errors import AbortedError, ConflictError, DeadlineError
from paramd.mesh.reading.stream import Reading
from paramd.state import At
from paramd_service.alerts.book import Observe
from paramd_service.alerts.config import AlertConfig, Rule
from paramd_service.alerts.drift import ReplicaGroup, drift_findings, groups_of, spans_of
from paramd_service.alerts.sampling import DigestRound, digests_of

if TYPE_CHECKING:
    from paramd.mesh.peers.discovery import SidecarFinder
    from paramd.mesh.peers.sidecars import Sidecars

log = logging.getLogger("paramd.control.alerts")

AHEAD = 3
"""Least steps between the request and the step requested."""

MOST_AHEAD = 100
STATE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Part:
    """Groups that are compared at one step."""

    groups: tuple[ReplicaGroup, ...]
    """All of the same state key."""

    @property
    def key(self) -> str:
        return self.groups[0].state_key

    @property
    def names(self) -> frozenset[str]:
        return frozenset(group.name for group in self.groups)


def parts_of(groups: Sequence[ReplicaGroup], keys: Iterable[str], *, most_bytes: int) -> list[Part]:
    """The groups, and their state of each key, in parts of at most `most_bytes` a rank. A larger
    group gets its own part."""
    parts = []
    for key in ("", *keys):
        taken: list[ReplicaGroup] = []
        bytes_of: dict[int, int] = {}
        for group in groups:
            fullest = max(bytes_of.get(rank, 0) for rank in group.begins)
            if taken and fullest + group.size_bytes > most_bytes:
                parts.append(Part(tuple(taken)))
                taken, bytes_of = [], {}
            taken.append(replace(group, state_key=key))
            for rank in group.begins:
                bytes_of[rank] = bytes_of.get(rank, 0) + group.size_bytes
        if taken:
            parts.append(Part(tuple(taken)))
    return parts


def due_step(begun_step: int, number: int, count: int, every: int) -> int:
    """When part `number` of `count` is due in a cycle of `every` steps."""
    return begun_step + number * every // count


@dataclass(eq=False)
class BitRounds:
    """Compares all replicas of one incarnation, part by part. Event loop only."""

    config: AlertConfig
    reaching: Callable[[], Awaitable[SidecarFinder]]
    joined: Callable[[], set[int]]
    """Ranks whose sidecars report."""
    observe: Observe

    def __post_init__(self) -> None:
        self._parts: list[Part] = []
        self._number = 0
        self._begun_step = -1
        self._history = 0
        self._ahead = AHEAD
        self._turn = 0
        self._said = ""

    async def one(self) -> bool:
        """Compare the next part at its step; return whether there was one. Raises ParamdError."""
        if not self.config.looks_for(Rule.REPLICA_DRIFT):
            return False
        reach = await self.reaching()
        deadline_s = time.monotonic() + self.config.sample_timeout_s

        async def attempt(sidecars: Sidecars) -> bool:
            return await self._one(reach, sidecars)

        return await reach.attempts(attempt, deadline_s)

    async def _one(self, reach: SidecarFinder, sidecars: Sidecars) -> bool:
        layout = (await reach.index(sidecars)).layout
        if layout.mirrored and not self.config.watch:
            return False
        ranks = sorted(self.joined())
        if not ranks:
            return False
        header = (await sidecars.state(ranks[0], STATE_TIMEOUT_S)).header
        now, history = header.step, header.history
        every = self.config.compare_steps
        if history != self._history:
            # After a rollback steps repeat: a cycle due at a later step would wait.
            self._history, self._begun_step, self._parts = history, now - every, []
        if self._number >= len(self._parts):
            self._parts = parts_of(
                groups_of(
                    layout.tensors, set(ranks), most_ranks=self.config.sample_ranks, turn=self._turn
                ),
                await self._keys(sidecars, ranks, At(history, now)),
                most_bytes=self.config.sample_bytes,
            )
            self._number, self._turn = 0, self._turn + 1
            # A cycle that took longer than its steps is followed by the next one at once.
            self._begun_step = max(self._begun_step + every, now)
        if not self._parts:
            return False
        part = self._parts[self._number]
        due = due_step(self._begun_step, self._number, len(self._parts), every)
        try:
            at = At(history, max(due, now + self._ahead))
            found = await self._compared(reach, sidecars, part, at)
        except (AbortedError, DeadlineError):
            # Training was faster than the request, slower than its deadline, or stopped.
            self._ahead = min(2 * self._ahead, MOST_AHEAD)
            return False
        self._ahead = AHEAD
        self._number += 1
        findings = drift_findings(found.differences, found.places, found.step)
        names = {"more tensors", *part.names}
        self.observe(findings, lambda a: a.rule == Rule.REPLICA_DRIFT and a.subject in names)
        return True

    async def _keys(self, sidecars: Sidecars, ranks: Sequence[int], now: At) -> list[str]:
        """Kinds of optimizer state that sidecars hold in memory."""
        from paramd.mesh.insight.steps import facts_of, hold

        deadline_s = time.monotonic() + self.config.sample_timeout_s
        at = At(now.history, now.step + self._ahead)
        try:
            async with AsyncExitStack() as stack:
                held = await hold(stack, sidecars, {ranks[0]: ()}, "any", at, deadline_s)
                return list(facts_of(held)[ranks[0]].keys)
        except ConflictError as error:
            if self._said != str(error):
                self._said = str(error)
                log.info("optimizer state is not compared: %s", error)
            return []

    async def _compared(
        self, reach: SidecarFinder, sidecars: Sidecars, part: Part, at: At
    ) -> DigestRound:
        from paramd.mesh.insight.steps import hold

        spans = spans_of(part.groups)
        deadline_s = time.monotonic() + self.config.sample_timeout_s
        async with AsyncExitStack() as stack:
            held = await hold(stack, sidecars, spans, part.key, at, deadline_s)
            reading = Reading(sidecars, held.pinned, deadline_s)
            return await digests_of(reach, reading, spans, part.groups)
