"""All exports and schedules of a control plane, as REST calls them."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from paramd import clock
from paramd.errors import ConflictError, DeniedError, ExhaustedError, ExistsError, ParamdError
from paramd.layout.edits.ops import EditState
from paramd.mesh.exports.calls import ExportInfo
from paramd.state_files import replace
from paramd.v1 import export_pb2
from paramd_service.aio import kept
from paramd_service.control.mesh.jobs import Incarnation
from paramd_service.control.mesh.registry import MeshView
from paramd_service.control.mesh.watch import Publish
from paramd_service.control.records.audit import Action
from paramd_service.control.records.events import Kind
from paramd_service.control.records.records import Records
from paramd_service.control.store.edits import EditRow
from paramd_service.control.store.engine import StoreError
from paramd_service.destinations.destinations import (
    ENVIRONMENT,
    Destination,
    DestinationKind,
    check_below,
    locate,
)
from paramd_service.exports.documents import (
    ADDED,
    Assets,
    export_document,
    load_added,
    named_at,
    read_spec,
    scheduled,
)
from paramd_service.exports.group import read_file, target_of
from paramd_service.exports.histories import is_on_the_way
from paramd_service.exports.incarnation import IncarnationExports
from paramd_service.exports.runner import ExportJob
from paramd_service.exports.schedules import MAX_SCHEDULES, Cadence, Schedules
from paramd_service.exports.store import ExportRow, ExportStore, ScheduleRow

FORGET_S: Final = 90 * 86_400.0
"""Unscheduled exports are listed this long after their end."""
WHOLE_COUNT: Final = 8
"""Number of finished exports reported to a training that begins."""
TELL_EVERY_S: Final = 1.0
"""Least time between two events of an export in which only byte counts changed."""

Named = Mapping[str, Destination]

log = logging.getLogger("paramd.control.exports")


class ExportService:
    """Made before jobs open; `close` before the records stop. Use on one event loop."""

    def __init__(
        self, records: Records, destinations: Named | None, added: Named, *, publish: Publish
    ) -> None:
        """`added` are those of `load_added`; without `destinations` the operator allows none."""
        self._allows_any = destinations is not None
        self._adding = asyncio.Lock()
        self.destinations = {} if destinations is None else {**added, **destinations}
        self.store = ExportStore(records.store)
        self.assets = Assets(records.directory)
        self.ended_counts: Counter[tuple[str, str]] = Counter()
        """Exports that ended in this process, by (job, state)."""
        self.written_bytes: Counter[str] = Counter()
        """Bytes written by exports that ended in this process, by job."""
        self._records = records
        self._publish = publish
        self._queues: dict[str, IncarnationExports] = {}
        self._schedules: dict[str, Schedules] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_s: dict[str, float] = {}
        self._failed: dict[str, ExportRow] = {}
        """Of each job, the newest export that has ended, if it failed."""

    async def close(self) -> None:
        """Stop without ending exports; the next control plane resumes them. Idempotent."""
        for schedules in self._schedules.values():
            await schedules.close()
        for queue in self._queues.values():
            await queue.close()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def add_destination(self, wanted: Destination) -> None:
        """Add a destination, for good. Idempotent.

        Raises:
            DeniedError: If the operator allows none.
            ExistsError: If the name has another root: exports and retention rely on it.
            UsageError: The file of added ones is damaged.
        """
        if not self._allows_any:
            raise DeniedError(
                f"the operator's empty {ENVIRONMENT} or [destinations] disables exports"
            )
        async with self._adding:
            # As the file stands: it may have been mended since the start, or be damaged still.
            file = self._records.directory / ADDED
            added = await asyncio.to_thread(load_added, file)
            there = {**added, **self.destinations}.get(wanted.name, wanted)
            if there.root != wanted.root:
                raise ExistsError(f"{wanted.name!r} is {there.root!r} for good; use another name")
            if wanted.name not in self.destinations:
                roots = {name: one.root for name, one in {**added, wanted.name: wanted}.items()}
                await asyncio.to_thread(replace, file, json.dumps(roots))
                self.destinations[wanted.name] = wanted

    def running(self) -> list[ExportJob]:
        return [job for queue in self._queues.values() for job in queue.runs.values()]

    def check(self, request: Mapping[str, Any], jobs: str | None) -> None:
        """Validate a request of a token for `jobs`, as in `ExportRow`. Raises UsageError,
        NotFoundError; DeniedError: its key is none that this token may write."""
        read_spec(request)
        wanted = str(request["destination"])
        locate(self.destinations, named_at(wanted, incarnation=1, step=0))
        check_below(wanted.partition("/")[2], jobs or "")

    async def create(
        self,
        mesh: Incarnation,
        request: Mapping[str, Any],
        *,
        actor: str,
        jobs: str | None = None,
        export_id: str | None = None,
        schedule: str = "",
    ) -> ExportInfo:
        """Queue an export; `jobs` as in `ExportRow`. Idempotent by id. Raises as `check`.
        ExhaustedError: the queue is full. ConflictError: the incarnation has ended, or the id
        belongs to another request."""
        mesh.check()
        self.check(request, jobs)
        queue = self._queues[mesh.job]
        if export_id is not None:
            found = await self._same(mesh.job, export_id, request)
            if found is not None:
                return found
        queue.check_room()
        row = ExportRow(
            id=export_id if export_id is not None else secrets.token_hex(16),
            job=mesh.job,
            destination=str(request["destination"]),
            format=str(request["format"]),
            actor=actor,
            schedule=schedule,
            request=request,
            generation=mesh.terms.generation,
            created_s=clock.now_s(),
            jobs=jobs,
        )
        await self.store.add(row)
        job = queue.add(row, [])
        self._tell(job, True)
        return export_document(job.row, job.files)

    def failed(self, job: str) -> ExportRow | None:
        """The newest export that has ended in this process, if it failed."""
        return self._failed.get(job)

    async def get(self, job: str, export_id: str) -> ExportInfo:
        """One export, by its whole id. Raises NotFoundError, StoreError."""
        live = self._live(job, export_id)
        if live is not None:
            return export_document(live.row, live.files)
        row = await self.store.get(job, export_id)
        return export_document(row, await self.store.files(row.id))

    async def page(self, job: str, *, limit: int, offset: int, state: str) -> list[ExportInfo]:
        """Exports of a job, newest first, without their files. Raises StoreError."""
        rows = await self.store.page(job, limit=limit, offset=offset, state=state)
        sizes = await self.store.sizes([row.id for row in rows])
        found = []
        for row in rows:
            live = self._live(job, row.id)
            if live is not None:
                size = live.export.size_bytes, live.export.written_bytes
                found.append(export_document(live.row, [], size=size))
            else:
                found.append(export_document(row, [], size=sizes.get(row.id, (0, 0))))
        return found

    async def whole(self, job: str) -> list[Mapping[str, Any]]:
        """The last finished exports of a job, newest first, and their directories, without those of
        a history that was rolled back: their steps may be above the present. Raises StoreError."""
        rows = await self.store.page(job, limit=WHOLE_COUNT, state="DONE")
        applied = await self._records.edits.of_job(job, (EditState.APPLIED,))
        applied.sort(key=lambda row: (row.incarnation, row.edits))
        back = [row for row in applied if row.detail.get("rollback")]
        return [
            {"id": row.id, "step": row.step, "format": row.format, "destination": row.destination}
            | self._directory(row.destination)
            for row in rows
            if not row.removed and _is_on_the_way(row, back)
        ]

    async def directory(self, job: str, given: str) -> tuple[str, str, str]:
        """(directory, destination, id) of a finished safetensors export, by the first characters of
        its id.

        Raises:
            NotFoundError: For an unknown one.
            ConflictError: For one that is not finished, was removed, has another format or is
                not in a directory.
        """
        row = await self.store.get(job, await self.store.whole_id(job, given))
        if row.state != "DONE" or row.removed:
            state = "removed" if row.removed else row.state
            raise ConflictError(f"export {row.id[:8]} is {state}; only a finished one can be read")
        if row.format != "safetensors":
            raise ConflictError(
                f"export {row.id[:8]} is in the format {row.format}; only safetensors files are "
                "read"
            )
        found = self._directory(row.destination)
        if found["why_not"]:
            raise ConflictError(f"export {row.id[:8]}: {found['why_not']}")
        return found["directory"], row.destination, row.id

    def _directory(self, named: str) -> dict[str, str]:
        try:
            destination, key = locate(self.destinations, named)
        except ParamdError as error:
            return {"directory": "", "why_not": str(error)}
        if destination.kind is not DestinationKind.DIRECTORY:
            return {"directory": "", "why_not": "it is not in a directory; load it before attach"}
        return {"directory": f"{destination.root.rstrip('/')}/{key}", "why_not": ""}

    async def cancel(self, job: str, export_id: str, *, actor: str) -> ExportInfo:
        """Cancel an export and wait for its end. Raises NotFoundError, ConflictError."""
        if (queue := self._queues.get(job)) is not None:
            await queue.cancel(export_id, f"cancelled by {actor}")
        found = await self.get(job, export_id)
        if found.state != "CANCELLED":
            raise ConflictError(f"export {export_id} is {found.state}; it cannot be cancelled")
        return found

    async def read_file(
        self,
        mesh: Incarnation,
        destination: str,
        name: str,
        offset_bytes: int,
        jobs: str | None,
    ) -> tuple[int, bytes]:
        """Read a file of a finished export of any job that the caller sees, or its manifest: (its
        size, up to 8 MiB from the offset). `jobs` as in `ExportRow`.

        Raises:
            UsageError, NotFoundError: There is no such destination, export or file.
        """
        mesh.check()
        target = target_of(self.destinations, destination, jobs=jobs)
        return await read_file(self._queues[mesh.job].group, target, name, offset_bytes)

    def schedules(self, job: str) -> Schedules:
        if job not in self._schedules:
            self._schedules[job] = Schedules(job, self.store, begin=self._begin_scheduled)
        return self._schedules[job]

    async def add_schedule(
        self,
        mesh: Incarnation,
        request: Mapping[str, Any],
        cadence: Cadence,
        *,
        actor: str,
        jobs: str | None,
        schedule_id: str | None,
    ) -> ScheduleRow:
        """Add a schedule; `jobs` as in `ExportRow`. Raises as `create`; ExhaustedError when the job
        has too many."""
        mesh.check()
        schedules = self.schedules(mesh.job)
        if len(await schedules.all()) >= MAX_SCHEDULES:
            raise ExhaustedError(f"a job has at most {MAX_SCHEDULES} schedules; delete one")
        request = {**request, "destination": scheduled(str(request["destination"]))}
        self.check(request, jobs)
        joined = mesh.registry.view().joined
        row = ScheduleRow(
            id=schedule_id if schedule_id is not None else secrets.token_hex(16),
            job=mesh.job,
            actor=actor,
            request=request,
            cadence=asdict(cadence),
            last_step=max(min((report.step for report in joined), default=0), 0),
            created_s=clock.now_s(),
            jobs=jobs,
        )
        return await schedules.add(row)

    def _live(self, job: str, export_id: str) -> ExportJob | None:
        queue = self._queues.get(job)
        return queue.runs.get(export_id) if queue is not None else None

    async def _same(
        self, job: str, export_id: str, request: Mapping[str, Any]
    ) -> ExportInfo | None:
        live = self._live(job, export_id)
        rows = [live.row] if live is not None else await self.store.find(export_id)
        for row in rows:
            if row.job != job or dict(row.request) != dict(request):
                raise ConflictError(f"export {export_id} is a different request; use a new id")
            return await self.get(job, export_id)
        return None

    def began(self, mesh: Incarnation) -> None:
        """Serve an incarnation, and take up the exports that were under way."""
        queue = IncarnationExports(
            mesh=mesh,
            store=self.store,
            place=self._place,
            assets=self._assets_of,
            on_change=self._tell,
            ended=self._ended,
        )
        queue.start(self._queues.get(mesh.job))
        self._queues[mesh.job] = queue
        kept(self._tasks, self._tidy(), "paramd-exports-tidy")

    def is_over(self, mesh: Incarnation) -> None:
        """Fail the exports of an incarnation that has ended."""
        # `Jobs` ends an incarnation before it begins the next, so this is its queue.
        queue = self._queues.get(mesh.job)
        if queue is not None:
            why = f"run {mesh.number} of the job has ended; export again"
            kept(self._tasks, queue.end(why), "paramd-exports-end")

    def evicted(self, job: str) -> None:
        """Let go of a job, once its exports have ended."""
        kept(self._tasks, self._forget(job))

    async def _forget(self, job: str) -> None:
        self._failed.pop(job, None)
        # Once its end has run: exports that end look for their queue.
        if (queue := self._queues.get(job)) is not None:
            await queue.close()
            if self._queues.get(job) is queue:
                del self._queues[job]
                if (schedules := self._schedules.pop(job, None)) is not None:
                    await schedules.close()

    async def _tidy(self) -> None:
        try:
            await self.store.forget(clock.now_s() - FORGET_S)
            await asyncio.to_thread(self.assets.sweep, await self.store.owners())
        except (StoreError, OSError) as error:
            log.warning("old exports could not be deleted: %s", error)

    def seen(self, mesh: Incarnation, view: MeshView) -> None:
        """Begin the exports that are due; called once a second."""
        queue = self._queues.get(mesh.job)
        if queue is not None and mesh.over is None:
            self.schedules(mesh.job).tick(view, queue)

    async def _begin_scheduled(self, row: ScheduleRow) -> None:
        request = {**row.request, "overwrite": False}
        mesh = self._queues[row.job].mesh
        await self.create(mesh, request, actor=row.actor, jobs=row.jobs, schedule=row.id)

    def _place(self, row: ExportRow) -> export_pb2.ExportTarget:
        overwrite = bool(row.request.get("overwrite", False))
        return target_of(
            self.destinations,
            row.destination,
            export_id=row.id,
            overwrite=overwrite,
            job=row.job,
            jobs=row.jobs,
        )

    async def _assets_of(self, row: ExportRow) -> Mapping[str, bytes]:
        owner = row.schedule or row.id
        names = row.request.get("assets", ())
        return await asyncio.to_thread(self.assets.read, row.job, owner, names)

    async def _ended(self, job: ExportJob) -> None:
        row = job.row
        self._told_s.pop(row.id, None)
        self.ended_counts[row.job, row.state] += 1
        if row.state == "FAILED":
            self._failed[row.job] = row
        elif row.state == "DONE":
            self._failed.pop(row.job, None)
        await self._records.event(
            Action(
                actor=row.actor,
                role="",
                method="export.end",
                job=row.job,
                incarnation=row.incarnation,
                step=row.step,
                detail={
                    "id": row.id,
                    "destination": row.destination,
                    "state": row.state,
                    "reason": row.reason,
                    "schedule": row.schedule,
                },
            )
        )
        self.written_bytes[row.job] += job.export.written_bytes
        if not row.schedule:
            await asyncio.to_thread(self.assets.forget, row.job, row.id)
        elif row.state == "DONE":
            try:
                await self.schedules(row.job).retain(row.schedule, self._queues[row.job])
            except StoreError as error:
                log.warning("schedule %s: nothing was removed: %s", row.schedule, error)

    def _tell(self, job: ExportJob, whole: bool) -> None:
        now_s = time.monotonic()
        if not whole and now_s - self._told_s.get(job.row.id, 0.0) < TELL_EVERY_S:
            return
        self._told_s[job.row.id] = now_s
        row = job.row
        data = {
            "id": row.id,
            "state": row.state,
            "destination": row.destination,
            "format": row.format,
            "incarnation": row.incarnation,
            "step": row.step,
            "schedule": row.schedule,
            "size_bytes": job.export.size_bytes,
            "written_bytes": job.export.written_bytes,
            "reason": row.reason[:500],
        }
        self._publish(Kind.EXPORT, data, job=row.job)


def _is_on_the_way(export: ExportRow, rollbacks: Sequence[EditRow]) -> bool:
    plan = export_pb2.ExportPlan.FromString(export.plan)
    own = [row for row in rollbacks if row.incarnation == export.incarnation]
    return is_on_the_way(export.step, plan.edits, own)
