"""Exports that begin by themselves, and what is kept of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Generic, TypeVar

from paramd import clock
from paramd.errors import NotFoundError, ParamdError, UsageError
from paramd_service.control.exports.incarnation import IncarnationExports
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.store.exports import ExportRow, ExportStore, ScheduleRow

MIN_EVERY_S = 1.0

Key = TypeVar("Key")

log = logging.getLogger("paramd.control.exports")

MAX_SCHEDULES: Final = 16

Begin = Callable[[ScheduleRow], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """How often, and what stays."""

    every_steps: int | None = None
    """An export at (or soon after) every multiple of so many steps."""
    every_s: float | None = None
    """An export so many seconds after the last one began."""
    keep_last: int | None = None
    """The newest so many stay; None removes nothing."""
    keep_every: int | None = None
    """Beside them, every so many-th stays, counted from the first."""

    def __post_init__(self) -> None:
        if (self.every_steps is None) == (self.every_s is None):
            raise UsageError("every_steps, every_s: give exactly one of them")
        if self.every_steps is not None and self.every_steps < 1:
            raise UsageError(f"every_steps: {self.every_steps}; expected 1 or more")
        if self.every_s is not None and not self.every_s >= MIN_EVERY_S:
            raise UsageError(f"every_s: {self.every_s}; expected {MIN_EVERY_S} or more")
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: {value}; expected 1 or more")
        if self.keep_every is not None and self.keep_last is None:
            raise UsageError("keep_every: needs keep_last; without it everything is kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What a schedule has done."""

    step: int
    """Step of the last occasion, taken or skipped; of its making before that."""
    time_s: float
    """When that was, in seconds since the Unix epoch."""
    running: bool
    """Whether its last export is under way."""


class Due(Enum):
    """What to do now."""

    NOT_YET = "its time has not come"
    SKIP = "skipped: the previous export still runs"
    BEGIN = "due"


def due(rhythm: Cadence, past: Past, *, step: int, now_s: float) -> Due:
    """What to do now. An occasion that comes while the previous export runs is skipped, not
    made up for: the caller notes it in `past` as it notes one that was taken.

    Args:
        step: The job's last finished update; -1 when not known.
    """
    if rhythm.every_steps is not None:
        came = step >= 0 and step // rhythm.every_steps > past.step // rhythm.every_steps
    else:
        assert rhythm.every_s is not None
        # A clock set back must not silence it for as long.
        came = not 0 <= now_s - past.time_s < rhythm.every_s
    if not came:
        return Due.NOT_YET
    return Due.SKIP if past.running else Due.BEGIN


@dataclass(frozen=True, slots=True)
class Kept(Generic[Key]):
    """An export that a schedule finished."""

    key: Key
    number: int
    """Which of the schedule's finished exports it was, from 0 on."""


def to_remove(rhythm: Cadence, finished: Sequence[Kept[Key]]) -> list[Key]:
    """Which of them go, oldest first: neither among the newest `keep_last` nor a
    `keep_every`-th.

    Args:
        finished: Those of this schedule alone that are still there, oldest first.
    """
    if rhythm.keep_last is None:
        return []
    old = finished[: max(len(finished) - rhythm.keep_last, 0)]
    return [
        one.key for one in old if rhythm.keep_every is None or one.number % rhythm.keep_every != 0
    ]


def rhythm_of(row: ScheduleRow) -> Cadence:
    """When a schedule exports. Raises UsageError."""
    return Cadence(**row.rhythm)


class Schedules:
    """Those of one job, looked at once a second while an incarnation of it goes on."""

    def __init__(self, job: str, store: ExportStore, *, begin: Begin) -> None:
        """`begin` starts one export of a schedule."""
        self._job = job
        self._store = store
        self._begin = begin
        self._rows: dict[str, ScheduleRow] | None = None
        self._running: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._retaining = asyncio.Lock()

    def tick(self, view: MeshView, queue: IncarnationExports) -> None:
        """Begins what is due. Never fails, never waits."""
        if self._looking is None or self._looking.done():
            step = min((report.step for report in view.joined), default=-1)
            self._running = {job.row.schedule for job in queue.all() if job.row.schedule}
            self._looking = asyncio.create_task(self._look(step), name="paramd-schedules")

    async def close(self) -> None:
        """Looks no more. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def all(self) -> list[ScheduleRow]:
        """Those in force, oldest first. Raises StoreError."""
        return list((await self._known()).values())

    async def get(self, schedule_id: str) -> ScheduleRow:
        """One in force. Raises NotFoundError."""
        found = (await self._known()).get(schedule_id)
        if found is None:
            raise NotFoundError(
                f"schedule {schedule_id[:64]!r} does not exist; see: paramd export-schedule list"
            )
        return found

    async def add(self, row: ScheduleRow) -> ScheduleRow:
        """Adds one; the same id again is the one that is there."""
        known = await self._known()
        if row.id not in known:
            await self._store.add_schedule(row)
            known[row.id] = row
        return known[row.id]

    async def delete(self, schedule_id: str) -> ScheduleRow:
        """Ends one; what it exported stays. Raises NotFoundError."""
        row = replace(await self.get(schedule_id), deleted_s=time.time())
        await self._store.save_schedule(row)
        (await self._known()).pop(schedule_id, None)
        return row

    async def retain(self, schedule_id: str, queue: IncarnationExports) -> None:
        """Removes what a schedule keeps no more: of its own exports, and of no others."""
        async with self._retaining:
            row = (await self._known()).get(schedule_id)
            if row is None:
                return
            done = await self._store.of_schedule(schedule_id)
            there = [Kept(one, number) for number, one in enumerate(done) if not one.removed]
            for old in to_remove(rhythm_of(row), there):
                await self._remove(old, queue)

    async def _remove(self, row: ExportRow, queue: IncarnationExports) -> None:
        row = replace(row, generation=queue.mesh.terms.generation)
        job = queue.known(row, await self._store.files(row.id))
        if await queue.remove(job):
            await self._store.save(replace(row, removed=True))
            log.info("export %s at %s: its schedule keeps it no more", row.id, row.destination)

    async def _look(self, step: int) -> None:
        try:
            for row in await self.all():
                await self._look_at(row, step)
        except ParamdError as error:
            log.warning("job %s: a look at its schedules failed: %s", self._job, error)

    async def _look_at(self, row: ScheduleRow, step: int) -> None:
        past = Past(step=row.last_step, time_s=row.last_s, running=row.id in self._running)
        now_s = clock.now_s()
        what = due(rhythm_of(row), past, step=step, now_s=now_s)
        if 0 <= step < row.last_step:
            # Training began again from an older checkpoint.
            await self._note(replace(row, last_step=step))
        elif what is not Due.NOT_YET:
            skipped = row.skipped_count + (what is Due.SKIP)
            # Noted first: a control plane that dies here skips one export, and repeats none.
            await self._note(
                replace(row, last_step=max(step, 0), last_s=now_s, skipped_count=skipped)
            )
            if what is Due.BEGIN:
                await self._begin(row)

    async def _note(self, row: ScheduleRow) -> None:
        await self._store.save_schedule(row)
        known = await self._known()
        if row.id in known:
            known[row.id] = row

    async def _known(self) -> dict[str, ScheduleRow]:
        if self._rows is None:
            self._rows = {row.id: row for row in await self._store.schedules(self._job)}
        return self._rows
