"""The audit: hash chains of records in the store, one chain per job.

`Audit` records a mutation's intent before its effect and the outcome after it. `Denials` records
refused calls at a bounded rate. `paramd/chain.py` links and checks records.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import Connection, insert, select, text

from paramd.chain import GENESIS, Link, canonical, link_hash
from paramd.errors import ParamdError, UnreachableError, reason_of
from paramd_service.aio import kept
from paramd_service.control.access.join import FailureLimit
from paramd_service.control.store.engine import StoreError
from paramd_service.control.store.schema import audit
from paramd_service.control.store.store import Store

LOCK_KEY = 0x70617261_6D640002
"""PostgreSQL advisory lock held while appending."""

BURST = 10.0
PER_S = 0.2
MAX_TEXT_CHARS = 200

log = logging.getLogger("paramd.control.audit")


def append(connection: Connection, job: str, record: Mapping[str, Any]) -> Link:
    """Append a record to a job's chain; the caller commits."""
    if connection.dialect.name == "postgresql":
        # Several control planes may share one chain. SQLite has a single writer anyway.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
    newest = links(connection, job, order="newest", beyond_seq=None, limit=1)
    last = newest[0] if newest else Link(0, "", GENESIS)
    seq = last.seq + 1
    body = canonical({**record, "job": job, "prev": last.hash, "seq": seq})
    link = Link(seq, body, link_hash(last.hash, body))
    connection.execute(insert(audit).values(job=job, seq=seq, body=body, hash=link.hash))
    return link


def links(
    connection: Connection, job: str, *, order: str, beyond_seq: int | None, limit: int
) -> list[Link]:
    """The "oldest" or "newest" records of a chain first, beyond `beyond_seq` if it is given."""
    oldest = order == "oldest"
    chosen = select(audit).where(audit.c.job == job).limit(limit)
    chosen = chosen.order_by(audit.c.seq if oldest else audit.c.seq.desc())
    if beyond_seq is not None:
        chosen = chosen.where(audit.c.seq > beyond_seq if oldest else audit.c.seq < beyond_seq)
    return [Link(row.seq, row.body, row.hash) for row in connection.execute(chosen)]


class AuditUnavailableError(UnreachableError):
    """The audit cannot be written, so changes are refused; reading still works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    actor: str
    """Name of the token, or of the part of the service that acts."""
    role: str
    method: str
    """Operation, e.g. "token.create"."""
    job: str
    """Chain of the record; empty for the site's."""
    incarnation: int = 0
    """0: not specific to one incarnation."""
    step: int = -1
    """-1: unknown or irrelevant."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serializable arguments; never secrets."""


class Entry:
    """A mutation in progress, and its outcome."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        """Position of the intent in its chain."""
        self.result = "done"
        self.detail: dict[str, Any] = {}

    def outcome(self, result: str = "done", **detail: object) -> None:
        """Set the content of the outcome record; the last call wins."""
        self.result, self.detail = result, detail


class Audit:
    """Appends to the chains. Single event loop; use while the store is started."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self.failure = ""
        """Why the last record could not be written; empty if it was."""

    @asynccontextmanager
    async def mutation(self, action: Action) -> AsyncIterator[Entry]:
        """Record the intent, run the body, record the outcome. Raises AuditUnavailableError if the
        intent could not be recorded; then the body did not run.

        An exception from the body is recorded as the outcome and re-raised. An intent without an
        outcome means that its fate is unknown: the process was killed, or the audit became
        unwritable (then the log says so).
        """
        entry = Entry(await self._intent(action))
        try:
            yield entry
        except BaseException as error:
            entry.outcome(f"failed: {_named(error)}", **entry.detail)
            raise
        finally:
            await self._outcome(action, entry)

    async def event(self, action: Action) -> None:
        """Record something that has already happened or needs no permission; never raises. An event
        that cannot be recorded is logged."""
        try:
            await self._append(action.job, self._body("event", action))
        except AuditUnavailableError as error:
            log.error("not in the audit: %s by %s (%s)", action.method, action.actor, error)

    async def page(
        self, job: str, *, order: str = "newest", beyond_seq: int | None = None, limit: int
    ) -> list[Link]:
        """As `links`. Raises StoreError."""
        return await self._store.read(
            partial(links, job=job, order=order, beyond_seq=beyond_seq, limit=limit)
        )

    async def _intent(self, action: Action) -> int:
        appending = asyncio.ensure_future(self._append(action.job, self._body("intent", action)))
        try:
            return await asyncio.shield(appending)
        except asyncio.CancelledError:
            # The shielded write continues: close the intent, or its fate would seem unknown.
            with suppress(AuditUnavailableError):
                entry = Entry(await appending)
                entry.outcome("failed: cancelled before it began")
                await self._outcome(action, entry)
            raise

    async def _outcome(self, action: Action, entry: Entry) -> None:
        try:
            # The body has run: a cancelled caller must not lose the outcome.
            await asyncio.shield(self._append(action.job, self._body("outcome", action, entry)))
        except AuditUnavailableError as error:
            log.error(
                "the outcome of record %d (%s) is not in the audit: %r (%s)",
                entry.seq,
                action.method,
                entry.result,
                error,
            )

    async def _append(self, job: str, record: Mapping[str, Any]) -> int:
        try:
            link = await self._store.write(partial(append, job=job, record=record))
        except StoreError as error:
            if str(error) != self.failure:
                log.error("the audit cannot be written, so changes are refused: %s", error)
            self.failure = str(error)
            raise AuditUnavailableError(
                f"audit: it cannot be written ({error}); nothing was changed, reads continue"
            ) from error
        self.failure = ""
        return link.seq

    def _body(self, kind: str, action: Action, entry: Entry | None = None) -> dict[str, Any]:
        detail = entry.detail if entry is not None else action.detail
        body: dict[str, Any] = {
            "actor": action.actor,
            "role": action.role,
            "method": action.method,
            "incarnation": action.incarnation,
            "step": action.step,
            "kind": kind,
            "time_ms": round(self._clock() * 1000),
            "detail": detail,
        }
        if entry is not None:
            body |= {"of": entry.seq, "result": entry.result}
        return body


def _named(error: BaseException) -> str:
    return reason_of(error).lower() if isinstance(error, ParamdError) else type(error).__name__


class Denials:
    """Records refusals without blocking, at a bounded rate: bad tokens cannot fill the disk."""

    def __init__(
        self,
        audit: Audit,
        job: str,
        *,
        burst: float = BURST,
        per_s: float = PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._audit = audit
        self._job = job
        self._limit = FailureLimit(burst=burst, per_s=per_s, clock=clock)
        self._unrecorded = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def saw(self, *, actor: str, role: str, method: str, reason: str) -> None:
        """Record or count one refusal; `actor` is empty when the caller is unknown."""
        if not self._limit.allows():
            self._unrecorded += 1
            return
        action = self._action(
            actor, role, method=method[:MAX_TEXT_CHARS], reason=reason[:MAX_TEXT_CHARS]
        )
        kept(self._tasks, self._audit.event(action), "paramd-audit-denied")

    async def close(self) -> None:
        """Wait for pending records, then record how many refusals were only counted."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._unrecorded:
            await self._audit.event(self._action("", ""))

    def _action(self, actor: str, role: str, **detail: object) -> Action:
        if self._unrecorded:
            detail["unrecorded_before"], self._unrecorded = self._unrecorded, 0
        return Action(actor=actor, role=role, method="denied", job=self._job, detail=detail)
