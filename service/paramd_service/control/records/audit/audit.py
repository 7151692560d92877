"""The audit: hash chains of records in the store, one chain per job.

Audit records a mutation's intent before its effect and the outcome after it. HeadFiles keeps the
head of each chain in a file apart from the store, because a chain alone cannot reveal that its
end was truncated. Denials records refused calls at a bounded rate.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select, text

from paramd.chain import START, Head, Link, canonical, link_hash
from paramd.errors import ParamdError, UnreachableError, reason_of
from paramd_service.control.store.engine import StoreError
from paramd_service.control.store.schema import audit
from paramd_service.control.store.store import Store

LOCK_KEY = 0x70617261_6D640002
"""PostgreSQL advisory lock held while appending."""

SLOT_BYTES = 128

HEAD_EVERY = 100
"""Records of a chain between two log lines with its head."""

BURST = 10.0
PER_S = 0.2
MAX_TEXT_CHARS = 200

log = logging.getLogger("paramd.control.audit")


class ChainBrokenError(Exception):
    """The store has lost or altered an earlier record; appending would hide that."""


def append(
    connection: Connection, job: str, known: Head, record: Callable[[int], Mapping[str, Any]]
) -> Link:
    """Append `record(seq)` to a job's chain; the caller commits.

    Args:
        known: The newest head kept apart from the store; the chain must still contain it.

    Raises:
        ChainBrokenError: it does not.
    """
    if connection.dialect.name == "postgresql":
        # Several control planes may share one chain. SQLite has a single writer anyway.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
    last = head(connection, job)
    if known.seq and (last if last.seq == known.seq else _at(connection, job, known.seq)) != known:
        raise ChainBrokenError(
            f"record {known.seq} of the audit was removed or replaced; run: paramd audit verify"
        )
    seq = last.seq + 1
    body = canonical({**record(seq), "job": job, "prev": last.hash, "seq": seq})
    link = Link(seq, body, link_hash(last.hash, body))
    connection.execute(insert(audit).values(job=job, seq=seq, body=body, hash=link.hash))
    return link


def head(connection: Connection, job: str) -> Head:
    """The chain's head according to the store."""
    chosen = (
        select(audit.c.seq, audit.c.hash)
        .where(audit.c.job == job)
        .order_by(audit.c.seq.desc())
        .limit(1)
    )
    row = connection.execute(chosen).first()
    return Head(row.seq, row.hash) if row is not None else START


def links(connection: Connection, job: str, *, after_seq: int, limit: int) -> list[Link]:
    """Records after `after_seq`, oldest first."""
    chosen = (
        select(audit).where(audit.c.job == job, audit.c.seq > after_seq).order_by(audit.c.seq)
    ).limit(limit)
    return [Link(row.seq, row.body, row.hash) for row in connection.execute(chosen)]


def newest(connection: Connection, job: str, *, before_seq: int | None, limit: int) -> list[Link]:
    """Records before `before_seq` (None: all), newest first."""
    chosen = select(audit).where(audit.c.job == job).order_by(audit.c.seq.desc()).limit(limit)
    if before_seq is not None:
        chosen = chosen.where(audit.c.seq < before_seq)
    return [Link(row.seq, row.body, row.hash) for row in connection.execute(chosen)]


def _at(connection: Connection, job: str, seq: int) -> Head | None:
    chosen = select(audit.c.hash).where(audit.c.job == job, audit.c.seq == seq)
    found = connection.execute(chosen).scalar()
    return Head(seq, found) if found is not None else None


class HeadFiles:
    """The head files of one directory. Single thread.

    A file has two one-line slots, written alternately, so a torn write loses only the newer line.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: dict[str, int] = {}

    def read(self, job: str) -> Head | None:
        """The newest head kept for a chain; None when there is none. Raises OSError."""
        try:
            text = path_of(self._directory, job).read_bytes()
        except FileNotFoundError:
            return None
        heads = []
        for begin in range(0, len(text), SLOT_BYTES):
            try:
                heads.append(Head.parse(text[begin : begin + SLOT_BYTES].decode("ascii")))
            except ValueError:
                continue  # torn, or never written
        return max(heads, key=lambda head: head.seq, default=None)

    def write(self, job: str, head: Head) -> None:
        """Store a head durably. Raises OSError."""
        descriptor = self._descriptors.get(job)
        if descriptor is None:
            path = path_of(self._directory, job)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._descriptors[job] = descriptor
            _make_durable(descriptor, self._directory)
        line = str(head).ljust(SLOT_BYTES - 1).encode() + b"\n"
        os.pwrite(descriptor, line, head.seq % 2 * SLOT_BYTES)
        os.fdatasync(descriptor)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def path_of(directory: Path, job: str) -> Path:
    """The head file of a chain; the site's own chain has no job."""
    return directory / (f"audit-{job}.head" if job else "audit.head")


def _make_durable(descriptor: int, directory: Path) -> None:
    if os.fstat(descriptor).st_size < 2 * SLOT_BYTES:
        # Allocate both slots now: storing a head must not fail on a full disk later.
        os.posix_fallocate(descriptor, 0, 2 * SLOT_BYTES)
        os.fsync(descriptor)
    listing = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(listing)
    finally:
        os.close(listing)


class AuditUnavailableError(UnreachableError):
    """The audit cannot be written, so mutations are refused; reading still works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """An action to record."""

    actor: str
    """Name of the token, or of the part of the service that acts."""
    role: str
    method: str
    """Operation, e.g. "token.create"."""
    job: str
    """The chain it is recorded in; empty for the site's own."""
    incarnation: int = 0
    """0: not specific to one incarnation."""
    step: int = -1
    """-1: unknown or irrelevant."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serializable arguments; never secrets."""


class Entry:
    """A mutation in progress, and how it ends."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        """Position of the intent in its chain."""
        self.result = "done"
        self.detail: dict[str, Any] = {}

    def outcome(self, result: str = "done", **detail: Any) -> None:
        """Set the content of the outcome record; the last call wins."""
        self.result, self.detail = result, detail


class Audit:
    """Appends to the chains. Single event loop; use while the store is started."""

    def __init__(
        self,
        store: Store,
        directory: Path,
        *,
        clock: Callable[[], float] = time.time,
        head_every: int = HEAD_EVERY,
    ) -> None:
        """`directory` holds the heads, apart from the store."""
        self._store = store
        self._directory = directory
        self._clock = clock
        self._head_every = head_every
        # Touched only by the store's writer thread.
        self._heads = HeadFiles(directory)
        self._known: dict[str, Head] = {}
        self.failure = ""
        """Why the last record could not be written; empty if it was."""

    @asynccontextmanager
    async def mutation(self, action: Action) -> AsyncIterator[Entry]:
        """Record the intent, run the body, record the outcome.

        An exception from the body is recorded as the outcome and re-raised. An intent without an
        outcome means that its fate is unknown: the process was killed, or the audit became
        unwritable (then the log says so).

        Raises:
            AuditUnavailableError: the intent could not be recorded; the body did not run.
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
        """Record something that has already happened or needs no permission; never raises.

        An event that cannot be recorded is logged.
        """
        try:
            await self._append(action.job, partial(self._body, "event", action, None))
        except AuditUnavailableError as error:
            log.error("not in the audit: %s by %s (%s)", action.method, action.actor, error)

    async def page(self, job: str, *, before_seq: int | None, limit: int) -> list[Link]:
        """Records of a chain before `before_seq` (None: all), newest first. Raises StoreError."""
        read = partial(newest, job=job, before_seq=before_seq, limit=limit)
        return await self._store.read(read)

    async def oldest(self, job: str, *, after_seq: int, limit: int) -> list[Link]:
        """Records after `after_seq`, oldest first. Raises StoreError."""
        read = partial(links, job=job, after_seq=after_seq, limit=limit)
        return await self._store.read(read)

    async def anchor(self, job: str) -> Head | None:
        """The head kept apart from the store. Raises StoreError."""
        # Its own HeadFiles: `self._heads` belongs to the writer thread.
        return await self._store.read(lambda _: HeadFiles(self._directory).read(job))

    async def stop(self) -> None:
        """Log the heads and close their files. Call before the store's stop; idempotent."""

        def close(_: Connection) -> None:
            for job, head in sorted(self._known.items()):
                _tell(job, head)
            self._heads.close()

        with suppress(StoreError):
            await self._store.write(close)

    async def _intent(self, action: Action) -> int:
        appending = asyncio.ensure_future(
            self._append(action.job, partial(self._body, "intent", action, None))
        )
        try:
            return await asyncio.shield(appending)
        except asyncio.CancelledError:
            # The shielded write goes on: close the intent, or it reads as fate unknown.
            with suppress(AuditUnavailableError):
                entry = Entry(await appending)
                entry.outcome("failed: cancelled before it began")
                await self._outcome(action, entry)
            raise

    async def _outcome(self, action: Action, entry: Entry) -> None:
        try:
            # The body has run: a cancelled caller must not lose the outcome.
            await asyncio.shield(
                self._append(action.job, partial(self._body, "outcome", action, entry))
            )
        except AuditUnavailableError as error:
            log.error(
                "the outcome of record %d (%s) is not in the audit: %r (%s)",
                entry.seq,
                action.method,
                entry.result,
                error,
            )

    async def _append(self, job: str, body: Callable[[int], Mapping[str, Any]]) -> int:
        try:
            link: Link = await self._store.write(
                partial(self._write, job=job, body=body), then=partial(self._written, job)
            )
        except (StoreError, ChainBrokenError, OSError) as error:
            if str(error) != self.failure:
                log.error("the audit cannot be written, mutations are refused: %s", error)
            self.failure = str(error)
            raise AuditUnavailableError(
                f"audit: it cannot be written ({error}); nothing was changed, reads continue"
            ) from error
        self.failure = ""
        return link.seq

    def _write(
        self, connection: Connection, *, job: str, body: Callable[[int], Mapping[str, Any]]
    ) -> Link:
        if job not in self._known:
            self._known[job] = self._heads.read(job) or START
        return append(connection, job, self._known[job], body)

    def _written(self, job: str, link: Link) -> None:
        # After the commit: a crash in between leaves the kept head one record behind, which the
        # chain still contains. Written before, it could name a record that was never committed.
        head = Head(link.seq, link.hash)
        self._known[job] = head
        self._heads.write(job, head)
        if link.seq % self._head_every == 0:
            _tell(job, head)

    def _body(self, kind: str, action: Action, entry: Entry | None, _seq: int) -> dict[str, Any]:
        detail = entry.detail if entry is not None else action.detail
        body: dict[str, Any] = {
            "kind": kind,
            "time_ms": round(self._clock() * 1000),
            "actor": action.actor,
            "role": action.role,
            "method": action.method,
            "incarnation": action.incarnation,
            "step": action.step,
            "detail": detail,
        }
        if entry is not None:
            body |= {"of": entry.seq, "result": entry.result}
        return body


def _named(error: BaseException) -> str:
    return reason_of(error).lower() if isinstance(error, ParamdError) else type(error).__name__


def _tell(job: str, head: Head) -> None:
    log.info("audit head of %s: %s", job or "the site", head)


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
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._left = burst
        self._seen_s = clock()
        self._unrecorded = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def saw(self, *, actor: str, role: str, method: str, reason: str) -> None:
        """Record or count one refusal; `actor` is empty when the caller is unknown."""
        if not self._allows():
            self._unrecorded += 1
            return
        detail: dict[str, object] = {"method": method[:MAX_TEXT_CHARS]}
        detail["reason"] = reason[:MAX_TEXT_CHARS]
        if self._unrecorded:
            detail["unrecorded_before"] = self._unrecorded
            self._unrecorded = 0
        action = Action(actor=actor, role=role, method="denied", job=self._job, detail=detail)
        task = asyncio.create_task(self._audit.event(action), name="paramd-audit-denied")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for pending records, then record how many refusals were only counted."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._unrecorded:
            detail = {"unrecorded_before": self._unrecorded}
            self._unrecorded = 0
            await self._audit.event(
                Action(actor="", role="", method="denied", job=self._job, detail=detail)
            )

    def _allows(self) -> bool:
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
