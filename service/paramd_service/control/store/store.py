"""The store: one writer thread, a few readers, and an event loop that never blocks."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, Executable, Table, select

from paramd.errors import NotFoundError, UsageError
from paramd_service.control.store.engine import (
    READERS,
    WRITES,
    StoreAddress,
    StoreError,
    make_engine,
    store_errors,
)
from paramd_service.control.store.migrate import check_current, migrate

MAX_WAITING = 1024
"""Most queued writes; one more is refused."""

T = TypeVar("T")

log = logging.getLogger("paramd.control.store")

ID_CHARS = 32
_HEX = re.compile("[0-9a-f]+")
_NAMED = 4
"""Candidates that an error names."""


def columns_of(row: Any, **stored: object) -> dict[str, object]:
    """A row's fields by column, mappings as JSON; `stored` has columns stored in other forms."""
    found = {one.name: getattr(row, one.name) for one in fields(row)}
    return {name: json_of(one) for name, one in found.items()} | stored


def json_of(value: Any) -> Any:
    """A mapping as the JSON that is stored; anything else unchanged."""
    return json.dumps(dict(value), sort_keys=True) if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True)
class _Write(Generic[T]):
    work: Callable[[Connection], T]
    then: Callable[[T], None]
    done: Future[T]


class Store:
    """A database, from `start` to `stop`. Single event loop.

    If it cannot be opened, every write tries again; until one succeeds all calls raise
    `StoreError`. A full disk therefore fails only the operations that need the store.
    """

    def __init__(self, address: StoreAddress, *, max_waiting: int = MAX_WAITING) -> None:
        self.address = address
        self._engine: Engine | None = None
        self._open = False
        self._writes: queue.Queue[_Write[Any] | None] = queue.Queue(max_waiting)
        self._writer: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._stopping = False

    @property
    def waiting_count(self) -> int:
        """Queued writes."""
        return self._writes.qsize()

    async def start(self) -> None:
        """Start the threads, open the store and run migrations.

        Raises:
            UsageError: Its driver is not installed.
            ConflictError: The store was made by a newer paramd.
            StoreError: It cannot be opened now. The store stays started and tries again.
        """
        self._engine = make_engine(self.address)
        self._readers = ThreadPoolExecutor(READERS, "paramd-store-reader")
        self._writer = threading.Thread(target=self._run, name="paramd-store-writer", daemon=True)
        self._writer.start()
        await self.write(lambda _: None)

    async def start_reading(self) -> None:
        """Open the store only to be read: nothing is created, converted or written.

        Raises:
            NotFoundError: There is none.
            ConflictError: Another version of paramd wrote it.
            StoreError: It cannot be read.
        """
        if self.address.path is not None and not self.address.path.exists():
            raise NotFoundError(f"nothing is stored: there is no {self.address}")
        self._engine = make_engine(self.address)
        self._readers = ThreadPoolExecutor(READERS, "paramd-store-reader")
        self._open = True
        await self.read(lambda connection: check_current(connection, self.address))

    async def stop(self) -> None:
        """Perform the queued writes, then close. Idempotent; safe after a failed start."""
        # First: a write queued behind the sentinel would never be performed.
        self._stopping = True
        readers, self._readers = self._readers, None
        if readers is None or self._engine is None:
            return
        if self._writer is not None:
            writer, self._writer = self._writer, None
            loop = asyncio.get_running_loop()
            # On a thread: `put` blocks while the queue is full, and the writer may take a while.
            await loop.run_in_executor(readers, self._end, writer)
        readers.shutdown()
        self._engine.dispose()

    async def write(
        self, work: Callable[[Connection], T], *, then: Callable[[T], None] = lambda _: None
    ) -> T:
        """Run `work` in its own transaction on the writer thread; return once it is durable.

        `then` runs after the commit, also on the writer thread, before the next write. A cancelled
        call either has no effect or is performed in full.

        Raises:
            StoreError: Nothing was written, or the commit's fate is unknown (connection lost).
        """
        return await asyncio.wrap_future(self.submit(work, then=then))

    def submit(
        self, work: Callable[[Connection], T], *, then: Callable[[T], None] = lambda _: None
    ) -> Future[T]:
        """Like `write`, for callers that do not wait. Never blocks.

        Raises:
            StoreError: If too many writes are queued, or the store has stopped.
        """
        if self._stopping or self._writer is None:
            raise StoreError("the store is not running")
        done: Future[T] = Future()
        try:
            self._writes.put_nowait(_Write(work, then, done))
        except queue.Full:
            raise StoreError(
                f"the store {self.address} is overloaded: {self._writes.maxsize} writes are "
                "queued; try again in a few seconds"
            ) from None
        return done

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on a reader thread, in a transaction that must not write.

        Raises:
            StoreError: If it cannot be read.
        """
        if self._stopping or self._readers is None:
            raise StoreError("the store is not running")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    async def all(self, chosen: Executable) -> Sequence[Any]:
        """The rows of a query. Raises StoreError."""
        return await self.read(lambda connection: connection.execute(chosen).all())

    async def first(self, chosen: Executable) -> Any:
        """The first row of a query; None if it has none. Raises StoreError."""
        return await self.read(lambda connection: connection.execute(chosen).first())

    def _read(self, work: Callable[[Connection], T]) -> T:
        assert self._engine is not None
        if not self._open:
            raise StoreError(f"the store {self.address} is not open; see the log for the reason")
        with store_errors(self.address), self._engine.begin() as connection:
            return work(connection)

    def _run(self) -> None:
        while (write := self._writes.get()) is not None:
            # Past this point a cancel comes too late: the write is performed in full.
            if not write.done.set_running_or_notify_cancel():
                continue
            try:
                result = self._perform(write)
            except BaseException as error:
                write.done.set_exception(error)
            else:
                write.done.set_result(result)

    def _perform(self, write: _Write[T]) -> T:
        assert self._engine is not None
        with store_errors(self.address):
            if not self._open:
                before = migrate(self._engine, self.address)
                self._open = True
                log.info("store %s is open (revision before: %r)", self.address, before)
            with self._engine.execution_options(**{WRITES: True}).begin() as connection:
                result = write.work(connection)
            write.then(result)
            return result

    def _end(self, writer: threading.Thread) -> None:
        self._writes.put(None)
        writer.join()


async def whole_id(store: Store, table: Table, job: str, given: str, *, see: str) -> str:
    """The id of the job's only row that begins with `given`; a whole id is not looked up. Raises as
    `only`, and StoreError."""
    if len(given) == ID_CHARS:
        return given
    found: list[str] = []
    # Digits sort below letters in every collation, so a range works; the id's index serves it.
    if _HEX.fullmatch(given):
        key = table.c.id
        chosen = select(key).where(table.c.job == job, key >= given, key < given + "g")
        rows = await store.all(chosen.order_by(key).limit(_NAMED + 1))
        found = [str(row[0]) for row in rows]
    return only(found, given, see=see)


def only(found: Sequence[str], given: str, *, see: str) -> str:
    """The only id of `found`, which all begin with `given`.

    Raises:
        NotFoundError: When there is none.
        UsageError: When there are several; `see` is the command that lists these ids.
    """
    if not found:
        raise NotFoundError(f"no id begins with {given[:ID_CHARS]!r}; see: {see}")
    if len(found) > 1:
        named = ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
        raise UsageError(f"several ids begin with {given!r}: {named}; give more characters")
    return found[0]
