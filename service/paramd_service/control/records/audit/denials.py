"""Rate-limited audit of refused calls: some in full, the rest as a count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paramd_service.control.records.audit.audit import Action, Audit

BURST = 10.0
PER_S = 0.2
MAX_TEXT_CHARS = 200


class Denials:
    """Records refusals without blocking, at a bounded rate: bad tokens cannot fill the disk."""

    def __init__(
        self,
        audit: Audit,
        job: str,
        *,
        burst: float = BURST,
        per_s: float = PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._audit = audit
        self._job = job
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._left = burst
        self._seen_s = clock()
        self._unrecorded = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def saw(self, *, actor: str, role: str, method: str, reason: str) -> None:
        """Record or count one refusal; `actor` is empty when the caller is unknown."""
        if not self._allows():
            self._unrecorded += 1
            return
        detail: dict[str, object] = {"method": method[:MAX_TEXT_CHARS]}
        detail["reason"] = reason[:MAX_TEXT_CHARS]
        if self._unrecorded:
            detail["unrecorded_before"] = self._unrecorded
            self._unrecorded = 0
        action = Action(actor=actor, role=role, method="denied", job=self._job, detail=detail)
        task = asyncio.create_task(self._audit.event(action), name="paramd-audit-denied")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for pending records, then record how many refusals were only counted."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._unrecorded:
            detail = {"unrecorded_before": self._unrecorded}
            self._unrecorded = 0
            await self._audit.event(
                Action(actor="", role="", method="denied", job=self._job, detail=detail)
            )

    def _allows(self) -> bool:
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
