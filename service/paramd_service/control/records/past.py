"""Records of the state dir's other jobs: read from their own stores, which others may be writing.

A job has a control plane of its own by default, so yesterday's run is in another store. The owner
of this control plane is the user whose state dir it is; nobody else is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from paramd import places
from paramd.errors import NotFoundError, ParamdError
from paramd.places import IncarnationRecord
from paramd_service.control.base.site import directory_of
from paramd_service.control.store.engine import parse_store
from paramd_service.control.store.history import MetricHistory
from paramd_service.control.store.store import Store

MAX_JOBS = 200
"""Most jobs listed, those that began last."""
READ_AT_ONCE = 2
"""Stores that are open at a time: each has threads and a connection."""

log = logging.getLogger("paramd.control")


@dataclass(frozen=True, slots=True)
class PastJob:
    """A job of this state dir that this control plane does not serve."""

    job: str
    runs: list[IncarnationRecord]
    """Oldest first; never empty."""


class OtherRecords:
    """Reads them. Single event loop."""

    def __init__(self, store: Callable[[], str]) -> None:
        """No I/O. `store`: the URL that control planes of this state dir are given, or empty."""
        self._store = store
        self._reading = asyncio.Semaphore(READ_AT_ONCE)

    async def jobs(self, but: Collection[str]) -> list[PastJob]:
        """Those that have ever begun, the one that began last first."""
        return await asyncio.to_thread(_jobs, frozenset(but))

    @asynccontextmanager
    async def history(self, job: str) -> AsyncIterator[MetricHistory]:
        """The metric history of a job, to be read.

        Raises:
            NotFoundError: No such job, or nothing is stored of it.
            ConflictError: Another version of paramd wrote it, or its directory is not private.
            StoreError: It cannot be read.
        """
        async with self._reading:
            directory = await asyncio.to_thread(_directory, job)
            store = Store(parse_store(self._store(), directory=directory))
            try:
                await store.start_reading()
                yield MetricHistory(store)
            finally:
                await store.stop()


def _directory(job: str) -> Path:
    if not places.is_known(job):
        raise NotFoundError(f"no job {job!r} has begun in {places.state_dir()}")
    return directory_of(job)


def _jobs(but: Collection[str]) -> list[PastJob]:
    found = []
    for job in places.known_jobs():
        if job in but:
            continue
        try:
            runs = places.incarnations(job)
        except ParamdError as error:
            log.info("the runs of job %s cannot be listed: %s", job, error)
            continue
        if runs:
            found.append(PastJob(job, runs))
    return sorted(found, key=lambda one: -one.runs[-1].began_s)[:MAX_JOBS]
