"""Scheduled exports and their retention."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeVar

from paramd import clock
from paramd.errors import ParamdError, UsageError
from paramd_service.aio import stopped
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.store.store import only
from paramd_service.exports.incarnation import IncarnationExports
from paramd_service.exports.runner import ExportJob, drop
from paramd_service.exports.store import ExportRow, ExportStore, ScheduleRow

Key = TypeVar("Key")

log = logging.getLogger("paramd.control.exports")

MAX_SCHEDULES: Final = 16

Begin = Callable[[ScheduleRow], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """How often to export, and which exports to keep."""

    every_steps: int
    """Export at, or soon after, every multiple of this many steps."""
    keep_last: int | None = None
    """Keep this many of the newest; None removes nothing."""
    keep_every: int | None = None
    """Also keep every n-th, counted from the first."""

    def __post_init__(self) -> None:
        if self.keep_every is not None and self.keep_last is None:
            raise UsageError("keep_every: requires keep_last; without it everything is kept")


class Due(Enum):
    """Decision about one schedule."""

    NOT_YET = "not due yet"
    SKIP = "skipped: the previous export is still running"
    BEGIN = "due"


def due(every_steps: int, *, last_step: int, step: int, running: bool) -> Due:
    """Decide whether a schedule fires now, at the job's last finished update (-1: unknown). If its
    last export is still `running`, the new one is skipped, not made up for: the caller records its
    step as `last_step`, like that of an export that began; at first it is that of its creation."""
    if step < 0 or step // every_steps <= last_step // every_steps:
        return Due.NOT_YET
    return Due.SKIP if running else Due.BEGIN


def to_remove(cadence: Cadence, finished: Sequence[tuple[int, Key]]) -> list[Key]:
    """Exports to remove, oldest first: those neither among the newest `keep_last` nor a
    `keep_every`-th. `finished` are those not removed yet, oldest first, each with its index among
    all that have finished, from 0."""
    if cadence.keep_last is None:
        return []
    old = finished[: max(len(finished) - cadence.keep_last, 0)]
    every = cadence.keep_every
    return [one for number, one in old if every is None or number % every != 0]


def cadence_of(row: ScheduleRow) -> Cadence:
    """The cadence in a schedule's row. Raises UsageError."""
    return Cadence(**row.cadence)


class Schedules:
    """The schedules of one job, checked once a second while it has an incarnation."""

    def __init__(self, job: str, store: ExportStore, *, begin: Begin) -> None:
        """`begin` queues one export of a schedule."""
        self._job = job
        self._store = store
        self._begin = begin
        self._rows: dict[str, ScheduleRow] | None = None
        self._running: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._retaining = asyncio.Lock()

    def tick(self, view: MeshView, queue: IncarnationExports) -> None:
        """Start a check for due schedules unless one is running. Never fails, never blocks."""
        if self._looking is None or self._looking.done():
            step = min((report.step for report in view.joined), default=-1)
            self._running = {job.row.schedule for job in queue.runs.values() if job.row.schedule}
            self._looking = asyncio.create_task(self._look(step), name="paramd-schedules")

    async def close(self) -> None:
        """Stop checking. Idempotent."""
        await stopped(self._looking)

    async def all(self) -> list[ScheduleRow]:
        """Active schedules, oldest first. Raises StoreError."""
        return list((await self._known()).values())

    async def add(self, row: ScheduleRow) -> ScheduleRow:
        """Add a schedule; if the id exists, return the existing one."""
        known = await self._known()
        if row.id not in known:
            await self._store.add_schedule(row)
            known[row.id] = row
        return known[row.id]

    async def delete(self, schedule_id: str) -> ScheduleRow:
        """Delete a schedule, keeping its exports, by the first characters of its id.

        Raises:
            NotFoundError, UsageError: When none, or several, begin like this.
        """
        known = await self._known()
        found = [one for one in known if one.startswith(schedule_id)]
        one = known[only(found, schedule_id, see="paramd export-schedule list")]
        row = replace(one, deleted_s=clock.now_s())
        await self._store.save_schedule(row)
        known.pop(row.id, None)
        return row

    async def retain(self, schedule_id: str, queue: IncarnationExports) -> None:
        """Remove the schedule's own exports that its retention no longer keeps."""
        async with self._retaining:
            row = (await self._known()).get(schedule_id)
            if row is None:
                return
            done = await self._store.of_schedule(schedule_id)
            there = [(number, one) for number, one in enumerate(done) if not one.removed]
            for old in to_remove(cadence_of(row), there):
                await self._remove(old, queue)

    async def _remove(self, row: ExportRow, queue: IncarnationExports) -> None:
        row = replace(row, generation=queue.mesh.terms.generation)
        job = ExportJob(row, await self._store.files(row.id), queue)
        if await drop(job):
            await self._store.save(replace(row, removed=True))
            log.info("export %s at %s: removed by its schedule", row.id, row.destination)

    async def _look(self, step: int) -> None:
        try:
            for row in await self.all():
                await self._look_at(row, step)
        except ParamdError as error:
            log.warning("job %s: checking its schedules failed: %s", self._job, error)

    async def _look_at(self, row: ScheduleRow, step: int) -> None:
        what = due(
            cadence_of(row).every_steps,
            last_step=row.last_step,
            step=step,
            running=row.id in self._running,
        )
        if 0 <= step < row.last_step:
            # Training was restarted from an older checkpoint.
            await self._note(replace(row, last_step=step))
        elif what is not Due.NOT_YET:
            skipped = row.skipped_count + (what is Due.SKIP)
            # Saved before it begins: a crash in between skips one export but never repeats one.
            await self._note(replace(row, last_step=step, skipped_count=skipped))
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
