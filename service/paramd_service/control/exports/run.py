"""Runs one export to its end, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from typing import Final

from paramd.errors import ConflictError, DeadlineError, ParamdError
from paramd_service.control.exports import machine
from paramd_service.control.exports.beginning import adopt, begin
from paramd_service.control.exports.finishing import finish
from paramd_service.control.exports.job import ExportJob
from paramd_service.control.exports.machine import State
from paramd_service.control.exports.writing import Writing
from paramd_service.control.store.errors import StoreError
from paramd_service.control.store.exports import TakenOverError

DROP_S: Final = 20.0

_SAVE_AGAIN_S: Final = 5.0

log = logging.getLogger("paramd.control.exports")


class Run:
    """One export under way. `run` is the task; `cancel` may come at any time."""

    def __init__(self, job: ExportJob) -> None:
        self.job = job
        self.asked_to_end = asyncio.Event()
        """Set by `cancel` and `fail`."""
        self.over = asyncio.Event()
        """Set by the queue when it runs no more."""
        self._work: asyncio.Task[None] | None = None
        self._ending: tuple[State, str] | None = None
        self._committing = False

    def fail(self, reason: str) -> None:
        """Has it end as FAILED, unless it is becoming visible at this moment."""
        if not self._committing:
            self._end(State.FAILED, reason)

    def cancel(self, reason: str) -> None:
        """Has it end as CANCELLED. Idempotent.

        Raises:
            ConflictError: it is over, or is becoming visible at this moment.
        """
        if self.job.export.is_over or self._committing:
            raise ConflictError(
                f"export {self.job.row.id} is {self.job.export.state}; it cannot be cancelled "
                "any more"
            )
        self._end(State.CANCELLED, reason)

    def _end(self, state: State, reason: str) -> None:
        self._ending = self._ending if self._ending is not None else (state, reason)
        self.asked_to_end.set()
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """Runs it to its end; what goes wrong ends it as FAILED.

        Cancelling this call leaves it to another control plane, as if this one had died.
        """
        work = self._work = asyncio.create_task(
            self._timed(), name=f"paramd-export-{self.job.row.id[:8]}"
        )
        if self._ending is not None:
            work.cancel()
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            if self.job.leases is not None:
                await self.job.leases.close(release=False)
            raise
        error = work.exception() if not work.cancelled() else None
        if isinstance(error, TakenOverError):
            log.warning("export %s: %s", self.job.row.id, error)
            return
        self._ended(error)
        await self._clean_up()
        await self._keep_end()

    async def _timed(self) -> None:
        limit_s = self.job.wish.timeout_s
        left_s = limit_s - (time.time() - self.job.row.created_s)
        timer = asyncio.timeout(max(left_s, 0.0))
        try:
            async with timer:
                await self._stages()
        except TimeoutError:
            if not timer.expired():
                raise
            raise DeadlineError(
                f"it was not done within {limit_s:g} s (timeout_s); allow more"
            ) from None

    async def _stages(self) -> None:
        job = self.job
        await (adopt(job) if job.has_begun else begin(job))
        if job.export.state is State.RUNNING:
            await Writing(job).run()
        if job.export.is_over:
            return
        await job.save()
        assert job.leases is not None
        # All bytes are written: the sidecars' memory is no longer needed.
        await job.leases.close(release=True)
        await finish(job, committing=self._commits)

    def _commits(self) -> None:
        self._committing = True

    def _ended(self, error: BaseException | None) -> None:
        job = self.job
        if error is not None:
            if not isinstance(error, ParamdError):
                log.error("export %s failed by a fault of paramd", job.row.id, exc_info=error)
            job.change(machine.failed(job.export, _told(error)))
        elif self._ending is not None:
            state, reason = self._ending
            end = machine.cancelled if state is State.CANCELLED else machine.failed
            job.change(end(job.export, reason))
        job.row = replace(job.row, ended_s=time.time())
        log.info(
            "export %s to %s, step %d: %s %s",
            job.row.id,
            job.row.destination,
            job.export.step,
            job.export.state,
            job.export.reason,
        )

    async def _clean_up(self) -> None:
        job = self.job
        if job.leases is not None:
            await job.leases.close(release=True)
        if job.export.state is not State.DONE and job.has_begun:
            gone = await drop(job)
            if self._committing:
                # Whether it became visible is not known: nobody answered in time.
                gone = await drop(job, finished=True) and gone
            job.row = replace(job.row, drop_owed=not gone)

    async def _keep_end(self) -> None:
        while True:
            try:
                await self.job.save()
            except StoreError as error:
                log.warning("the end of export %s is not kept yet: %s", self.job.row.id, error)
                await asyncio.sleep(_SAVE_AGAIN_S)
            except TakenOverError:
                return
            else:
                return


async def drop(job: ExportJob, *, finished: bool = False) -> bool:
    """Removes what an export left at its destination; whether that could be done."""
    names = list(job.export.files)
    try:
        work = partial(job.crew.calls.drop, target=job.target, names=names, finished=finished)
        async with asyncio.timeout(DROP_S):
            await job.crew.any(work, wait=False)
    except (ParamdError, TimeoutError) as error:
        log.warning("export %s: its files could not be removed: %s", job.row.id, error)
        return False
    return True


def _told(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return _told(error.exceptions[0])
    if isinstance(error, ParamdError):
        return str(error)
    return f"a fault of paramd ({type(error).__name__}); the control plane's log has more"
