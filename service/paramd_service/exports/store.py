"""Stored exports and their schedules. A control plane that takes over an export stamps it with its
own generation, which fences out writers of lower ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, union_all, update

from paramd.errors import ConflictError, NotFoundError
from paramd_service.control.store.schema import export_files, export_schedules, exports
from paramd_service.control.store.store import Store, columns_of, whole_id

OPEN_STATES = ("PLANNED", "RUNNING", "VERIFYING")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRow:
    id: str
    """32 hexadecimal digits."""
    job: str
    destination: str
    """Name of the destination, "/", key."""
    format: str
    actor: str
    schedule: str = ""
    """Id of the schedule that started it; empty when requested by a user."""
    request: Mapping[str, Any]
    """The original request."""
    state: str = "PLANNED"
    reason: str = ""
    incarnation: int = 0
    """0 while nothing is pinned."""
    step: int = -1
    plan: bytes = b""
    """paramd.v1.ExportPlan with the pins; empty while nothing is pinned."""
    generation: int
    """Generation of the control plane that runs it."""
    drop_owed: bool = False
    """Whether partial files must still be removed."""
    removed: bool = False
    """Whether a schedule's retention has removed it."""
    created_s: float
    """Seconds since the Unix epoch."""
    ended_s: float | None = None
    jobs: str | None = None
    """Patterns of the jobs that its author's token is for; None: all."""


class FileState(StrEnum):
    WAITING = "WAITING"
    WRITING = "WRITING"
    WRITTEN = "WRITTEN"
    VERIFIED = "VERIFIED"


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    name: str
    size_bytes: int
    rank: int = -1
    """Rank that writes or wrote the file; while it waits, the planned rank."""
    state: FileState = FileState.WAITING
    written_bytes: int = 0
    checksum: str = ""
    """XXH3-128 of the whole file in hexadecimal, once it is written."""
    sources: frozenset[int] = frozenset()
    """Ranks whose snapshots hold its bytes; not stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRow:
    """A schedule that starts exports."""

    id: str
    job: str
    actor: str
    request: Mapping[str, Any]
    """The request of each export; "/step-N" is added to a `destination` without "{step}"."""
    cadence: Mapping[str, Any] = field(default_factory=dict)
    last_step: int
    """Step at which it last fired, whether exported or skipped."""
    skipped_count: int = 0
    created_s: float
    deleted_s: float | None = None
    jobs: str | None = None
    """As in `ExportRow`."""


class TakenOverError(ConflictError):
    """A control plane of a higher generation has taken over the export."""


class ExportStore:
    """Reads and writes the tables. All methods raise StoreError when they cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, row: ExportRow) -> None:
        """Add an export.

        Raises:
            ConflictError: When the id is taken.
        """

        def work(connection: Connection) -> None:
            taken = select(exports.c.id).where(exports.c.id == row.id)
            if connection.execute(taken).first() is not None:
                raise ConflictError(f"export {row.id} exists already")
            connection.execute(insert(exports).values(columns_of(row)))

        await self._store.write(work)

    async def save(self, row: ExportRow, files: Iterable[File] = ()) -> None:
        """Write an export and the given ones of its files.

        Raises:
            TakenOverError: When a control plane of a higher generation has taken it over.
        """
        listed = list(files)

        def work(connection: Connection) -> None:
            # The fence: with a newer generation in the row, nothing is written, files included.
            mine = exports.c.id == row.id, exports.c.generation <= row.generation
            changed = connection.execute(update(exports).where(*mine).values(columns_of(row)))
            if not changed.rowcount:
                raise TakenOverError(f"export {row.id}: a newer control plane has taken it over")
            for number, file in enumerate(listed):
                key = export_files.c.export_id == row.id, export_files.c.name == file.name
                values = columns_of(file)
                del values["sources"]  # of the plan
                if not connection.execute(update(export_files).where(*key).values(values)).rowcount:
                    new = {**values, "export_id": row.id, "number": number}
                    connection.execute(insert(export_files).values(new))

        await self._store.write(work)

    async def get(self, job: str, export_id: str) -> ExportRow:
        """One export. Raises NotFoundError."""
        chosen = select(exports).where(exports.c.id == export_id, exports.c.job == job)
        row = await self._store.first(chosen)
        if row is None:
            raise NotFoundError(f"export {export_id[:64]!r} does not exist; see: paramd exports")
        return _export(row)

    async def whole_id(self, job: str, given: str) -> str:
        """The id that `given` begins. Raises NotFoundError, UsageError."""
        return await whole_id(self._store, exports, job, given, see="paramd exports")

    async def find(self, export_id: str) -> list[ExportRow]:
        """The export with this id, of any job, as a list of at most one."""
        return await self._all(select(exports).where(exports.c.id == export_id))

    async def files(self, export_id: str) -> list[File]:
        """Files of an export, in plan order."""
        chosen = (
            select(export_files)
            .where(export_files.c.export_id == export_id)
            .order_by(export_files.c.number, export_files.c.name)
        )
        return [_file(row) for row in await self._store.all(chosen)]

    async def page(
        self, job: str, *, limit: int, offset: int = 0, state: str = ""
    ) -> list[ExportRow]:
        """Exports of a job, newest first."""
        chosen = select(exports).where(exports.c.job == job)
        if state:
            chosen = chosen.where(exports.c.state == state)
        newest = chosen.order_by(exports.c.created_s.desc(), exports.c.id)
        return await self._all(newest.limit(limit).offset(offset))

    async def sizes(self, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        """(total bytes, written bytes) by export id, for exports whose files are known."""
        size, done = func.sum(export_files.c.size_bytes), func.sum(export_files.c.written_bytes)
        key = export_files.c.export_id
        chosen = select(key, size, done).where(key.in_(ids)).group_by(key)
        rows = await self._store.all(chosen)
        return {row[0]: (int(row[1]), int(row[2])) for row in rows}

    async def unfinished(self, job: str) -> list[ExportRow]:
        """Open exports and those that may have left partial files, oldest first."""
        chosen = select(exports).where(
            exports.c.job == job, exports.c.state.in_(OPEN_STATES) | exports.c.drop_owed
        )
        return await self._all(chosen.order_by(exports.c.created_s))

    async def of_schedule(self, schedule_id: str) -> list[ExportRow]:
        """A schedule's completed exports, including removed ones, oldest first."""
        chosen = select(exports).where(exports.c.schedule == schedule_id, exports.c.state == "DONE")
        return await self._all(chosen.order_by(exports.c.created_s, exports.c.id))

    async def add_schedule(self, row: ScheduleRow) -> None:
        """Add a schedule.

        Raises:
            ConflictError: When the id is taken, by whatever job.
        """

        def work(connection: Connection) -> None:
            taken = select(export_schedules.c.id).where(export_schedules.c.id == row.id)
            if connection.execute(taken).first() is not None:
                raise ConflictError(f"schedule {row.id} is a different request; use a new id")
            connection.execute(insert(export_schedules).values(columns_of(row)))

        await self._store.write(work)

    async def save_schedule(self, row: ScheduleRow) -> None:
        """Overwrite a schedule; one deleted meanwhile is not revived."""
        key = export_schedules.c.id == row.id
        if row.deleted_s is None:
            key &= export_schedules.c.deleted_s.is_(None)
        statement = update(export_schedules).where(key).values(columns_of(row))
        await self._store.write(lambda connection: connection.execute(statement))

    async def schedules(self, job: str) -> list[ScheduleRow]:
        """A job's active schedules, oldest first."""
        chosen = (
            select(export_schedules)
            .where(export_schedules.c.job == job, export_schedules.c.deleted_s.is_(None))
            .order_by(export_schedules.c.created_s, export_schedules.c.id)
        )
        return [_schedule(row) for row in await self._store.all(chosen)]

    async def owners(self) -> set[str]:
        """Ids of all open exports and active schedules, of any job."""
        running = select(exports.c.id).where(exports.c.state.in_(OPEN_STATES))
        in_force = select(export_schedules.c.id).where(export_schedules.c.deleted_s.is_(None))
        both = union_all(running, in_force)
        rows = await self._store.all(both)
        return {str(row[0]) for row in rows}

    async def forget(self, before_s: float) -> None:
        """Delete exports that ended before `before_s`, except scheduled ones and those with
        partial files left."""
        old = exports.c.ended_s < before_s, exports.c.schedule == "", ~exports.c.drop_owed
        statement = delete(exports).where(*old)
        await self._store.write(lambda connection: connection.execute(statement))

    async def _all(self, chosen: Select[Any]) -> list[ExportRow]:
        return [_export(row) for row in await self._store.all(chosen)]


def _export(row: Row[Any]) -> ExportRow:
    found = dict(row._mapping)
    return ExportRow(**{**found, "request": json.loads(row.request), "plan": bytes(row.plan)})


def _file(row: Row[Any]) -> File:
    found = dict(row._mapping)
    del found["export_id"], found["number"]
    return File(**{**found, "state": FileState(row.state)})


def _schedule(row: Row[Any]) -> ScheduleRow:
    found = dict(row._mapping)
    return ScheduleRow(
        **{**found, "request": json.loads(row.request), "cadence": json.loads(row.cadence)}
    )
