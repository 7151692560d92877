"""All edits of a control plane: those under way by job, those in the store for ever; and holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from contextlib import suppress

from paramd.errors import NotFoundError
from paramd_service.control.edits.desk import EditDesk
from paramd_service.control.edits.limits import EditConfig, Pace
from paramd_service.control.edits.machine import EditState
from paramd_service.control.edits.work import EditWork
from paramd_service.control.events import Kind
from paramd_service.control.holds import Hold, HoldView
from paramd_service.control.incarnation import Incarnation
from paramd_service.control.records import Records
from paramd_service.control.store.edits import EditRow
from paramd_service.control.view import MeshView
from paramd_service.control.watch import Publish

log = logging.getLogger("paramd.control.edits")


class Edits:
    """Use on one event loop. Told of incarnations by `Jobs`."""

    def __init__(self, records: Records, config: EditConfig, *, publish: Publish) -> None:
        """No I/O."""
        self.config = config
        self._records = records
        self._publish = publish
        self._desks: dict[str, tuple[int, EditDesk]] = {}
        self._holds: dict[str, Hold] = {}
        self._paces: dict[str, Pace] = {}
        self._older: list[EditDesk] = []
        self.ended: Counter[tuple[str, str]] = Counter()
        """Edits that ended here, by job and state."""
        self.seconds: dict[str, float] = defaultdict(float)
        """Time from creation to APPLIED of all of them together, by job; in seconds."""

    def began(self, incarnation: Incarnation) -> None:
        """An epoch begins."""
        job = incarnation.job
        work = EditWork(incarnation, self._records, self.config, told=self._told)
        pace = self._paces.setdefault(job, Pace(self.config.max_per_minute))
        desk = EditDesk(incarnation, work, self._records.edits, self.config, pace)
        if job in self._desks:
            self._older.append(self._desks[job][1])
        self._desks[job] = (incarnation.epoch, desk)
        self._holds[job] = Hold(incarnation, work.calls, agree_s=work.agree_s, told=self._hold_told)
        work.begin()

    def is_over(self, incarnation: Incarnation) -> None:
        """An epoch is over: what it had agreed on went with it."""
        epoch, desk = self._desks.get(incarnation.job, (0, None))
        if desk is None or epoch != incarnation.epoch:
            return
        desk.work.epoch_ended(f"epoch {epoch} ended ({incarnation.over})")

    def look(self, incarnation: Incarnation, _: MeshView, now_s: float | None = None) -> None:
        """Once a second."""
        found = self._desks.get(incarnation.job)
        if found is not None and found[0] == incarnation.epoch:
            now_s = now_s if now_s is not None else time.monotonic()
            found[1].work.look(now_s)
        self._older = [desk for desk in self._older if desk.work.open]

    def desk(self, job: str) -> EditDesk:
        """Where edits of the job's last epoch are asked for. Raises NotFoundError."""
        found = self._desks.get(job)
        if found is None:
            raise NotFoundError(f"job {job[:64]!r} is not served here")
        return found[1]

    def hold(self, job: str) -> Hold:
        """The hold of the job's last epoch. Raises NotFoundError."""
        self.desk(job)
        return self._holds[job]

    def hold_counts(self) -> dict[str, int]:
        """Holds begun here in the job's last epoch, by job."""
        return {job: hold.begun_count for job, hold in self._holds.items()}

    def open_counts(self) -> Counter[tuple[str, str]]:
        """Edits under way, by job and state."""
        return Counter(
            (job, driver.row.state)
            for job, (_, desk) in self._desks.items()
            for driver in desk.work.open.values()
        )

    async def get(self, job: str, edit_id: str) -> EditRow:
        """An edit as it is told now. Raises NotFoundError."""
        desk = self._desks.get(job)
        driver = desk[1].work.open.get(edit_id) if desk is not None else None
        row = driver.row if driver is not None else await self._records.edits.find(edit_id)
        if row is None or row.job != job:
            raise NotFoundError(f"edit {edit_id} does not exist; see: paramd edits")
        return row

    async def wait(self, row: EditRow, wait_s: float) -> EditRow:
        """The edit once it has ended, or as it is after `wait_s` seconds."""
        desk = self._desks.get(row.job)
        driver = desk[1].work.open.get(row.id) if desk is not None else None
        if driver is None:
            return await self.get(row.job, row.id)
        if wait_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(driver.until(), wait_s)
        return driver.row

    async def page(
        self, job: str, *, limit: int, before: int | None, state: str | None
    ) -> list[EditRow]:
        """The newest edits of a job, newest first."""
        rows = await self._records.edits.page(job, limit=limit, before=before, state=state)
        desk = self._desks.get(job)
        live = desk[1].work.open if desk is not None else {}
        return [live[row.id].row if row.id in live else row for row in rows]

    async def close(self) -> None:
        """Stops what is under way; it is taken up by the next control plane."""
        for desk in [*self._older, *(desk for _, desk in self._desks.values())]:
            await desk.work.close()

    def _told(self, row: EditRow) -> None:
        if row.ended_s is not None:
            self.ended[row.job, row.state] += 1
            if row.state == EditState.APPLIED:
                self.seconds[row.job] += row.ended_s - row.created_s
        log.info("job %s: edit %s is %s %s", row.job, row.id, row.state, row.reason)
        data = {
            "id": row.id,
            "epoch": row.epoch,
            "state": row.state,
            "reason": row.reason[:1000],
            "step": row.step,
            "actor": row.actor,
            "undo_of": row.undo_of,
        }
        self._publish(Kind.EDIT, data, job=row.job)

    def _hold_told(self, job: str, view: HoldView) -> None:
        log.info("job %s is %s, held by %s", job, view.state, view.holder or "nobody")
        data = {
            "state": view.state.value,
            "holder": view.holder,
            "step": view.step,
            "steps_left": view.steps_left,
        }
        self._publish(Kind.HOLD, data, job=job)
