"""One trainer, looked at from its sidecar: now, and every few seconds while it is overdue.

Looking again and again is what tells since when: a stack says where a thread is, not for how long.
A training on schedule is left alone.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from paramd.memory.control_page import Word
from paramd_service.aio import stopped
from paramd_service.sidecar.insight.line import LoggedNumbers, Stacks, TrainerLine
from paramd_service.sidecar.insight.process import TrainerOutput
from paramd_service.sidecar.owner import AttachedMemory

OVERDUE_LEAST_S = 5.0
OVERDUE_STEPS = 5
"""A boundary is overdue after this many step times, and at least `OVERDUE_LEAST_S`."""

LOOK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Looked:
    """What was seen, and for how long it has been so."""

    stacks: Stacks
    seen_for_s: float
    """How long the training's thread has been seen at this place; 0 at the first look."""
    overdue: bool


class TrainerInsight:
    """A trainer's line, numbers and activity over time."""

    def __init__(self, attached: AttachedMemory) -> None:
        """No I/O."""
        self.numbers = LoggedNumbers()
        self.line = TrainerLine(attached.trainer_pid, attached.request.start, self.numbers)
        self.output = TrainerOutput()
        self._pid = attached.trainer_pid
        self._page = attached.page
        self._task: asyncio.Task[None] | None = None
        self._place: tuple[object, ...] = ()
        self._since_s = 0.0

    def start(self) -> None:
        """Look at the trainer whenever it is overdue."""
        self._task = asyncio.create_task(self._watch(), name="paramd-insight")

    async def stop(self) -> None:
        """The trainer has ended: look no more, but keep its output. Idempotent."""
        await stopped(self._task)
        self._task = None
        self.line.close()

    async def close(self) -> None:
        """Idempotent."""
        await self.stop()
        await asyncio.to_thread(self.output.close)

    @property
    def overdue(self) -> bool:
        """Whether the next boundary should have come long ago."""
        boundary_ns = self._page[Word.BOUNDARY_NS]
        if not boundary_ns or self._page[Word.HELD]:
            return False
        least_s = max(OVERDUE_LEAST_S, OVERDUE_STEPS * self._page[Word.STEP_TIME_NS] / 1e9)
        return time.monotonic() - boundary_ns / 1e9 > least_s

    async def look(self, *, with_collectives: bool = False) -> Looked:
        """Stacks now, with collectives if asked or overdue. Never fails for a trainer's sake."""
        overdue = self.overdue
        stacks = await self.line.stacks(collectives=overdue or with_collectives)
        return Looked(stacks, self._seen_for_s(stacks), overdue)

    def _seen_for_s(self, stacks: Stacks) -> float:
        place = (self._page[Word.BOUNDARY_NS], stacks.activity)
        if place != self._place:
            self._place, self._since_s = place, stacks.at_s
        return max(time.monotonic() - self._since_s, 0.0)

    async def _watch(self) -> None:
        await asyncio.to_thread(self.output.open, self._pid)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.overdue:
                # Without collectives: an evaluation is overdue, too, and should not pay for them.
                self._seen_for_s(await self.line.stacks(collectives=False))
