"""Exports that begin by themselves, and what is kept of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from paramd.errors import NotFoundError, ParamdError
from paramd_service.control.exports.queue import Queue
from paramd_service.control.exports.rhythm import Due, Kept, Past, Rhythm, due, to_remove
from paramd_service.control.store.exports import ExportRow, ExportStore, ScheduleRow
from paramd_service.control.view import MeshView

MAX_SCHEDULES: Final = 16

log = logging.getLogger("paramd.control.exports")

Begin = Callable[[ScheduleRow], Awaitable[object]]


def rhythm_of(row: ScheduleRow) -> Rhythm:
    """When a schedule exports. Raises UsageError."""
    return Rhythm(**row.rhythm)


class Schedules:
    """Those of one job, looked at once a second while an epoch of it goes on."""

    def __init__(self, job: str, store: ExportStore, *, begin: Begin) -> None:
        """`begin` starts one export of a schedule."""
        self._job = job
        self._store = store
        self._begin = begin
        self._rows: dict[str, ScheduleRow] | None = None
        self._running: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._retaining = asyncio.Lock()

    def look(self, view: MeshView, queue: Queue) -> None:
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

    async def retain(self, schedule_id: str, queue: Queue) -> None:
        """Removes what a schedule keeps no more: of its own exports, and of no others."""
        async with self._retaining:
            row = (await self._known()).get(schedule_id)
            if row is None:
                return
            done = await self._store.of_schedule(schedule_id)
            there = [Kept(one, number) for number, one in enumerate(done) if not one.removed]
            for old in to_remove(rhythm_of(row), there):
                await self._remove(old, queue)

    async def _remove(self, row: ExportRow, queue: Queue) -> None:
        row = replace(row, generation=queue.incarnation.terms.generation)
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
        now_s = time.time()
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
