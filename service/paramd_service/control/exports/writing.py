"""The second part of an export: its files are given to sidecars until all are written."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from paramd.errors import ConflictError, ParamdError, UnreachableError, codes_of
from paramd.v1 import export_pb2
from paramd_service.control.exports import machine
from paramd_service.control.exports.calls import RankLostError
from paramd_service.control.exports.job import ExportJob
from paramd_service.control.exports.machine import FileState, State

PER_RANK: Final = 1
"""Files that one sidecar writes at once: more would not make its disk faster."""
MAX_TRIES: Final = 3
"""Of one file, when what went wrong may go right the next time."""
NOBODY_S: Final = 10.0
"""How long a writer is waited for when none is joined."""

_LOOK_S: Final = 0.5
_AGAIN_S: Final = 0.5

log = logging.getLogger("paramd.control.exports")

_Task = asyncio.Task[export_pb2.ExportedFile]


class Writing:
    """The writing of one export."""

    def __init__(self, job: ExportJob) -> None:
        assert job.plan is not None
        self._job = job
        self._index = {file.name: number for number, file in enumerate(job.plan.files)}
        self._tasks: dict[_Task, tuple[str, int]] = {}
        self._tries: dict[str, int] = {}
        self._gone: set[str] = set()
        """Addresses that stopped answering; a sidecar that is respawned has another."""

    async def run(self) -> None:
        """Returns when all files are written, or the export has failed.

        Raises:
            UnreachableError: no sidecar is left that could write.
        """
        try:
            await self._make_ready()
            nobody_since_s = time.monotonic()
            while self._job.export.state is State.RUNNING:
                self._give()
                if self._tasks:
                    nobody_since_s = time.monotonic()
                elif time.monotonic() - nobody_since_s > NOBODY_S:
                    raise UnreachableError("no sidecar is left that could write")
                await self._look()
        finally:
            await self._cancel(list(self._tasks))

    async def _make_ready(self) -> None:
        job = self._job
        await job.group.any(
            lambda rank, address: job.group.calls.begin(
                rank, address, job.target, job.export.size_bytes
            ),
            lost=job.rank_lost,
        )

    def _give(self) -> None:
        job, ranks = self._job, self._well()
        for name, rank in machine.next_files(job.export, ranks, per_rank=PER_RANK):
            job.change(machine.given(job.export, name, rank))
            task = asyncio.create_task(self._write(name, rank, ranks[rank]))
            self._tasks[task] = (name, rank)

    def _well(self) -> dict[int, str]:
        joined = self._job.group.ranks()
        return {rank: address for rank, address in joined.items() if address not in self._gone}

    async def _write(self, name: str, rank: int, address: str) -> export_pb2.ExportedFile:
        job, joined = self._job, self._job.group.ranks()
        if self._tries.get(name):
            await asyncio.sleep(_AGAIN_S)
        request = export_pb2.WriteExportFileRequest(
            target=job.target, plan=job.message, file=self._index[name]
        )
        sources = [
            (source, joined[source])
            for source in sorted(job.export.files[name].sources - {rank})
            if source in joined
        ]
        return await job.group.calls.write(
            rank,
            address,
            request,
            sources=sources,
            moved=lambda size: job.change(machine.moved(job.export, name, size)),
            timeout_s=job.spec.timeout_s,
        )

    async def _look(self) -> None:
        if self._tasks:
            done, _ = await asyncio.wait(
                self._tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                self._ended(task, *self._tasks.pop(task))
        else:
            await asyncio.sleep(_LOOK_S)
        files = self._job.export.files
        stale = [
            task
            for task, (name, rank) in self._tasks.items()
            if files[name].state is not FileState.WRITING or files[name].rank != rank
        ]
        await self._cancel(stale)
        await self._job.save_progress()

    def _ended(self, task: _Task, name: str, rank: int) -> None:
        job = self._job
        try:
            found = task.result()
        except RankLostError as error:
            self._gone.add(job.group.ranks().get(error.rank, ""))
            job.rank_lost(error.rank, str(error))
            job.change(machine.returned(job.export, name))
        except ParamdError as error:
            self._failed(name, rank, error)
        else:
            self._written(name, rank, found)

    def _written(self, name: str, rank: int, found: export_pb2.ExportedFile) -> None:
        job = self._job
        size_bytes = job.export.files[name].size_bytes
        if (found.name, found.size_bytes) != (name, size_bytes):
            raise ConflictError(
                f"rank {rank} wrote {found.size_bytes:,} bytes as {found.name!r}; planned were "
                f"{size_bytes:,} as {name!r}"
            )
        if job.export.files[name].state is FileState.WRITING:
            job.change(machine.written(job.export, name, found.xxh3.hex()))

    def _failed(self, name: str, rank: int, error: ParamdError) -> None:
        job = self._job
        self._tries[name] = self._tries.get(name, 0) + 1
        log.warning("export %s: rank %d, file %s: %s", job.row.id, rank, name, error)
        if codes_of(error).retry and self._tries[name] < MAX_TRIES:
            job.change(machine.returned(job.export, name))
        else:
            job.change(machine.failed(job.export, f"{name}: {error}"))

    async def _cancel(self, tasks: list[_Task]) -> None:
        for task in tasks:
            self._tasks.pop(task, None)
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
