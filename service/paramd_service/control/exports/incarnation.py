"""The exports of one incarnation of one job: some run, the others wait their turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from paramd.errors import ExhaustedError, ParamdError
from paramd_service.control.exports.runner import ExportJob, ExportRun, OnChange, Place, drop
from paramd_service.control.exports.sidecars import SidecarGroup
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.store.engine import StoreError
from paramd_service.control.store.exports import ExportFileRow, ExportRow, ExportStore

MAX_RUNNING: Final = 2
"""Each holds a snapshot, so more of them would need more memory."""
MAX_WAITING: Final = 64

_AGAIN_S: Final = 5.0

log = logging.getLogger("paramd.control.exports")

Ended = Callable[[ExportJob], Awaitable[None]]


class IncarnationExports:
    """`start`, then `add` and `cancel`, then `end` or `close`."""

    def __init__(
        self,
        mesh: Incarnation,
        store: ExportStore,
        *,
        place: Place,
        assets: Callable[[ExportRow], Awaitable[Mapping[str, bytes]]],
        on_change: OnChange,
        ended: Ended,
    ) -> None:
        """No I/O.

        Args:
            assets: Reads what is copied beside an export.
            ended: Is awaited with every export that has come to its end here.
        """
        self.mesh = mesh
        self.group = SidecarGroup(mesh)
        self._store = store
        self._place = place
        self._assets = assets
        self._on_change = on_change
        self._ended = ended
        self._runs: dict[str, ExportRun] = {}
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = ""

    def start(self) -> None:
        """Takes over what the store has of the job."""
        self._task(self._take_over(), "paramd-exports-found")

    def get(self, export_id: str) -> ExportJob | None:
        """An export that runs or waits here."""
        run = self._runs.get(export_id)
        return run.job if run is not None else None

    def all(self) -> list[ExportJob]:
        """All that run or wait here."""
        return [run.job for run in self._runs.values()]

    def check_room(self) -> None:
        """Raises ExhaustedError when too many wait."""
        if len(self._runs) >= MAX_RUNNING + MAX_WAITING:
            raise ExhaustedError(
                f"{MAX_WAITING} exports of job {self.mesh.job!r} wait already; try again later"
            )

    def add(self, row: ExportRow, files: list[ExportFileRow]) -> ExportJob:
        """Begins, or goes on with, an export as soon as there is a place for it."""
        if row.id in self._runs:
            return self._runs[row.id].job
        job = ExportJob(
            row,
            files,
            group=self.group,
            place=self._place,
            assets={},
            store=self._store,
            on_change=self._on_change,
        )
        run = self._runs[row.id] = ExportRun(job)
        if self._over:
            run.fail(self._over)
        self._task(self._run(run), f"paramd-export-slot-{row.id[:8]}")
        return job

    async def cancel(self, export_id: str, reason: str) -> None:
        """Ends an export that is here, and waits for that.

        Raises:
            ConflictError: it cannot be cancelled any more.
        """
        run = self._runs.get(export_id)
        if run is not None:
            run.cancel(reason)
            await run.over.wait()

    async def end(self, reason: str) -> None:
        """The incarnation is over: all of it fails, for the sidecars leave."""
        self._over = reason
        for run in list(self._runs.values()):
            run.fail(reason)
        await self._wait()
        await self.group.close()

    async def close(self) -> None:
        """The control plane stops: what goes on is left to the next one. Idempotent."""
        if not self._over:
            for task in self._tasks:
                task.cancel()
        await self._wait()
        await self.group.close()

    async def remove(self, job: ExportJob) -> bool:
        """Removes a finished export from its destination; whether that could be done."""
        return await drop(job, finished=True)

    def known(self, row: ExportRow, files: list[ExportFileRow]) -> ExportJob:
        """An export of the past as it is in the store, to be looked at or removed."""
        return ExportJob(
            row, files, group=self.group, place=self._place, assets={}, store=self._store
        )

    async def _run(self, run: ExportRun) -> None:
        job = run.job
        try:
            async with self._turn(run):
                try:
                    job.assets = await self._assets(job.row)
                except ParamdError as error:
                    run.fail(str(error))
                await run.run()
        finally:
            self._runs.pop(job.row.id, None)
            run.over.set()
        await self._ended(job)

    @asynccontextmanager
    async def _turn(self, run: ExportRun) -> AsyncIterator[None]:
        """Waits for a place; what has been asked to end needs none."""
        place = asyncio.ensure_future(self._slots.acquire())
        asked = asyncio.ensure_future(run.asked_to_end.wait())
        try:
            await asyncio.wait({place, asked}, return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            asked.cancel()
            if not place.cancel() and not place.cancelled():
                self._slots.release()

    async def _take_over(self) -> None:
        while True:
            try:
                for row in await self._store.unfinished(self.mesh.job):
                    if row.id not in self._runs:
                        await self._take_if_possible(row)
                return
            except StoreError as error:
                log.warning("exports of the past are not known yet: %s", error)
                await asyncio.sleep(_AGAIN_S)

    async def _take_if_possible(self, row: ExportRow) -> None:
        try:
            await self._take(row)
        except StoreError:
            raise
        except ParamdError as error:
            log.warning("export %s cannot be gone on with: %s", row.id, error)

    async def _take(self, row: ExportRow) -> None:
        files = await self._store.files(row.id)
        row = replace(row, generation=self.mesh.terms.generation)
        await self._store.save(row)
        if row.ended_s is None:
            self.add(row, files)
        else:
            self._task(self._drop_owed(row, files), "paramd-export-drop")

    async def _drop_owed(self, row: ExportRow, files: list[ExportFileRow]) -> None:
        await self.group.wait_for([0])
        if await drop(self.known(row, files)):
            await self._store.save(replace(row, drop_owed=False))

    def _task(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.WARNING if isinstance(error, ParamdError) else logging.ERROR
            log.log(level, "%s ended with %r", task.get_name(), error)

    async def _wait(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))
