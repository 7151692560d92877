"""The exports of one incarnation: a few run, the others are queued."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from paramd.errors import ExhaustedError, ParamdError
from paramd_service.aio import kept
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.store.engine import StoreError
from paramd_service.exports.group import SidecarGroup
from paramd_service.exports.runner import ExportJob, ExportRun, OnChange, Place, drop
from paramd_service.exports.store import ExportRow, ExportStore, File

MAX_RUNNING: Final = 2
"""Each running export holds a snapshot, which costs memory."""
MAX_WAITING: Final = 64

_AGAIN_S: Final = 5.0

log = logging.getLogger("paramd.control.exports")

Ended = Callable[[ExportJob], Awaitable[None]]


@dataclass(kw_only=True, eq=False)
class IncarnationExports:
    """Life cycle: `start`, any number of `add` and `cancel`, then `end` or `close`."""

    mesh: Incarnation
    store: ExportStore
    place: Place
    assets: Callable[[ExportRow], Awaitable[Mapping[str, bytes]]]
    """Reads the small files copied into an export."""
    on_change: OnChange
    ended: Ended
    """Awaited with every export that ended here."""

    def __post_init__(self) -> None:
        self.group = SidecarGroup(self.mesh)
        self.runs: dict[str, ExportRun] = {}
        """Running and queued exports, by id."""
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = ""

    def start(self, earlier: IncarnationExports | None) -> None:
        """Resume the job's unfinished exports from the store, once the queue of its earlier run,
        whose end was asked for, has ended its own."""
        self._task(self._take_over(earlier), "paramd-exports-found")

    def check_room(self) -> None:
        """Raises ExhaustedError when the queue is full."""
        if len(self.runs) >= MAX_RUNNING + MAX_WAITING:
            raise ExhaustedError(
                f"{MAX_WAITING} exports of job {self.mesh.job!r} are queued already; retry later"
            )

    def add(self, row: ExportRow, files: list[File]) -> ExportJob:
        """Queue an export, new or resumed. Idempotent by id."""
        if row.id in self.runs:
            return self.runs[row.id]
        run = self.runs[row.id] = ExportRun(row, files, self)
        if self._over:
            run.fail(self._over)
        self._task(self._run(run), f"paramd-export-slot-{row.id[:8]}")
        return run

    async def cancel(self, export_id: str, reason: str) -> None:
        """Cancel an export and wait for its end; no effect if it is not here.

        Raises:
            ConflictError: When it can no longer be cancelled.
        """
        run = self.runs.get(export_id)
        if run is not None:
            run.cancel(reason)
            await run.over.wait()

    async def end(self, reason: str) -> None:
        """Fail all exports: the incarnation ended, and its sidecars with it."""
        self._over = reason
        for run in list(self.runs.values()):
            run.fail(reason)
        await self.settled()
        await self.group.close()

    async def close(self) -> None:
        """Stop without ending exports; the next control plane resumes them. Idempotent."""
        if not self._over:
            for task in self._tasks:
                task.cancel()
        await self.settled()
        await self.group.close()

    async def _run(self, run: ExportRun) -> None:
        try:
            async with self._turn(run):
                try:
                    run.assets = await self.assets(run.row)
                except ParamdError as error:
                    run.fail(str(error))
                await run.run()
        finally:
            self.runs.pop(run.row.id, None)
            run.over.set()
        await self.ended(run)

    @asynccontextmanager
    async def _turn(self, run: ExportRun) -> AsyncIterator[None]:
        """Wait for a free slot, or for a request to end the run, which needs none."""
        place = asyncio.ensure_future(self._slots.acquire())
        asked = asyncio.ensure_future(run.asked_to_end.wait())
        try:
            await asyncio.wait({place, asked}, return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            asked.cancel()
            # cancel() returns False once the slot was acquired: then it must be given back.
            if not place.cancel() and not place.cancelled():
                self._slots.release()

    async def _take_over(self, earlier: IncarnationExports | None) -> None:
        if earlier is not None:
            await earlier.settled()
        while True:
            try:
                for row in await self.store.unfinished(self.mesh.job):
                    if row.id not in self.runs:
                        await self._take(row)
                return
            except StoreError as error:
                log.warning("unfinished exports cannot be loaded yet: %s", error)
                await asyncio.sleep(_AGAIN_S)

    async def _take(self, row: ExportRow) -> None:
        files = await self.store.files(row.id)
        # Fences the previous control plane: its saves and sidecar calls are refused.
        row = replace(row, generation=self.mesh.terms.generation)
        try:
            await self.store.save(row)
            if row.ended_s is None:
                self.add(row, files)
            else:
                self._task(self._drop_owed(row, files), "paramd-export-drop")
        except StoreError:
            raise
        except ParamdError as error:
            log.warning("export %s cannot be resumed: %s", row.id, error)

    async def _drop_owed(self, row: ExportRow, files: list[File]) -> None:
        await self.group.wait_for([0])
        if await drop(ExportJob(row, files, self)):
            await self.store.save(replace(row, drop_owed=False))

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        kept(self._tasks, work, name).add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.WARNING if isinstance(error, ParamdError) else logging.ERROR
            log.log(level, "%s ended with %r", task.get_name(), error)

    async def settled(self) -> None:
        """Wait until nothing runs here."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
