"""Stored edits: requests and their outcomes; never removed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Select, insert, select, update

from paramd.errors import ExistsError
from paramd_service.control.store.schema import edits
from paramd_service.control.store.store import Store, columns_of, json_of, whole_id

_CHANGING = (
    "state", "reason", "ended_s", "boundary", "token", "step", "edits", "stop_ns", "detail",
)  # fmt: skip
"""Columns that follow an edit's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EditRow:
    number: int = 0
    """Assigned by the store in rising order; 0 before that."""
    id: str
    """32 hexadecimal digits."""
    job: str
    incarnation: int
    state: str
    reason: str = ""
    actor: str
    """Name of the requester's token."""
    role: str
    note: str = ""
    created_s: float
    """Seconds since the Unix epoch."""
    ended_s: float | None = None
    boundary: int = 0
    token: int = 0
    step: int = -1
    edits: int = -1
    stop_ns: int = 0
    size_bytes: int = 0
    """Bytes of the elements changed, replicas counted once."""
    manifest: bytes
    """A serialized paramd.v1.EditManifest."""
    digest: str
    """XXH3-128 of the manifest, in hexadecimal digits."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Operations as in REST documents, flags, statistics before and after."""
    undo_of: str = ""
    undone_by: str = ""


class EditStore:
    """Reads and writes the table. All methods raise StoreError when it cannot be used."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, row: EditRow) -> int:
        """Add an edit and return its number.

        Raises:
            ExistsError: If the id has been used.
        """

        def work(connection: Connection) -> int:
            used = select(edits.c.number).where(edits.c.id == row.id)
            if connection.execute(used).first() is not None:
                raise ExistsError(f"edit {row.id}: the id is taken by another edit; use a new one")
            values = columns_of(row, manifest=zlib.compress(row.manifest, 1))
            del values["number"]  # the store's
            statement = insert(edits).values(values).returning(edits.c.number)
            return int(connection.execute(statement).scalar_one())

        return await self._store.write(work)

    async def save(self, row: EditRow) -> None:
        """Write the mutable fields; an applied undo also marks the edit it undid."""
        changed = {name: json_of(getattr(row, name)) for name in _CHANGING}

        def work(connection: Connection) -> None:
            connection.execute(update(edits).where(edits.c.id == row.id).values(changed))
            # In the same transaction: an applied undo and `undone_by` must not diverge.
            if row.undo_of and row.state == "APPLIED":
                undone = update(edits).where(edits.c.id == row.undo_of)
                connection.execute(undone.values(undone_by=row.id))

        await self._store.write(work)

    async def find(self, edit_id: str) -> EditRow | None:
        """The edit with this id; None when there is none."""
        chosen = select(edits).where(edits.c.id == edit_id)
        row = await self._store.first(chosen)
        return edit_of(row) if row is not None else None

    async def whole_id(self, job: str, given: str) -> str:
        """The id that `given` begins. Raises NotFoundError, UsageError."""
        return await whole_id(self._store, edits, job, given, see="paramd edits")

    async def page(
        self, job: str, *, limit: int, before: int | None = None, state: str | None = None
    ) -> list[EditRow]:
        """A job's edits, newest first; with `before`, only those with lower numbers."""
        chosen = chosen_edits(job, state=state)
        if before is not None:
            chosen = chosen.where(edits.c.number < before)
        rows = await self._store.all(chosen.limit(limit))
        return [edit_of(row) for row in rows]

    async def of_job(
        self, job: str, states: Collection[str], *, incarnation: int | None = None
    ) -> list[EditRow]:
        """A job's edits in any of `states`, oldest first."""
        chosen = select(edits).where(edits.c.job == job, edits.c.state.in_(list(states)))
        if incarnation is not None:
            chosen = chosen.where(edits.c.incarnation == incarnation)
        chosen = chosen.order_by(edits.c.number)
        return [edit_of(row) for row in await self._store.all(chosen)]


def chosen_edits(
    job: str, *, state: str | None = None, id_prefix: str | None = None
) -> Select[Any]:
    """The query for a job's edits, newest first."""
    chosen = select(edits).where(edits.c.job == job).order_by(edits.c.number.desc())
    if state is not None:
        chosen = chosen.where(edits.c.state == state)
    if id_prefix is not None:
        chosen = chosen.where(edits.c.id.startswith(id_prefix, autoescape=True))
    return chosen


def edit_of(row: Row[Any]) -> EditRow:
    found = dict(row._mapping)
    found["manifest"] = zlib.decompress(found["manifest"])
    found["detail"] = json.loads(found["detail"])
    return EditRow(**found)
