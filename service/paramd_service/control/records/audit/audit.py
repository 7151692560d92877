"""Record mutations: the intent before the effect, the outcome after it, both in one chain."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from paramd.chain import START, Head, Link
from paramd.errors import ParamdError, UnreachableError, reason_of
from paramd_service.control.records.audit import chain_store
from paramd_service.control.records.audit.chain_store import ChainBrokenError
from paramd_service.control.records.audit.heads import HeadFiles
from paramd_service.control.store.errors import StoreError
from paramd_service.control.store.store import Store

KEY_BYTES = 32
KEY_FILE = "audit.key"

log = logging.getLogger("paramd.control.audit")

HEAD_EVERY = 100
"""Records of a chain between two log lines with its head."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A value that the audit shows only as a keyed digest. Equal values have equal digests."""

    value: bytes | str = field(repr=False)


def load_key(directory: Path) -> bytes:
    """The digest key, created if missing. Raises OSError."""
    path = directory / KEY_FILE
    if not path.exists():
        _offer_key(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} does not hold {KEY_BYTES} bytes; remove it")
    return key


def _offer_key(path: Path) -> None:
    """Create the key atomically: written in full, then linked; the first of several wins."""
    descriptor, written = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(written, path)
    finally:
        os.unlink(written)


def shown(value: Any, key: bytes) -> Any:
    """`value` with every nested `Hidden` replaced by its HMAC-SHA256."""
    if isinstance(value, Hidden):
        data = value.value.encode() if isinstance(value.value, str) else value.value
        return {"hmac_sha256": hmac.new(key, data, hashlib.sha256).hexdigest()}
    if isinstance(value, Mapping):
        return {str(name): shown(found, key) for name, found in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(found, key) for found in value]
    return value


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
    epoch: int = 0
    """0: not specific to one epoch."""
    step: int = -1
    """-1: unknown or irrelevant."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serializable arguments; potential secrets as `Hidden`."""


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
        """`directory` holds the heads and the digest key, apart from the store."""
        self._store = store
        self._directory = directory
        self._clock = clock
        self._head_every = head_every
        # Touched only by the store's writer thread.
        self._heads = HeadFiles(directory)
        self._known: dict[str, Head] = {}
        self._key = b""
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
        read = partial(chain_store.newest, job=job, before_seq=before_seq, limit=limit)
        return await self._store.read(read)

    async def oldest(self, job: str, *, after_seq: int, limit: int) -> list[Link]:
        """Records after `after_seq`, oldest first. Raises StoreError."""
        read = partial(chain_store.links, job=job, after_seq=after_seq, limit=limit)
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
                f"audit: it cannot be written ({error}); nothing was changed, reading goes on"
            ) from error
        self.failure = ""
        return link.seq

    def _write(
        self, connection: Connection, *, job: str, body: Callable[[int], Mapping[str, Any]]
    ) -> Link:
        if not self._key:
            self._key = load_key(self._directory)
        if job not in self._known:
            self._known[job] = self._heads.read(job) or START
        return chain_store.append(connection, job, self._known[job], body)

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
            "epoch": action.epoch,
            "step": action.step,
            "detail": shown(detail, self._key),
        }
        if entry is not None:
            body |= {"of": entry.seq, "result": entry.result}
        return body


def _named(error: BaseException) -> str:
    return reason_of(error).lower() if isinstance(error, ParamdError) else type(error).__name__


def _tell(job: str, head: Head) -> None:
    log.info("audit head of %s: %s", job or "the site", head)
