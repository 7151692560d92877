"""Runs one export: pin a step, have sidecars write the files, verify, commit or clean up.

ExportJob holds the state and saves it, Writing assigns files to sidecars, ExportRun is the task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from paramd.clock import now_s
from paramd.errors import (
    ConflictError,
    DataLossError,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
    codes_of,
)
from paramd.layout.exports.files import ExportState
from paramd.layout.exports.peft import ADAPTER_CONFIG
from paramd.mesh.peers.grpc import RankUnreachableError
from paramd.v1 import export_pb2
from paramd_service.aio import all_of, ended
from paramd_service.control.mesh.registry import MeshView, waited_for
from paramd_service.control.store.engine import StoreError
from paramd_service.exports import machine
from paramd_service.exports.documents import ExportSpec, named_anew, read_spec
from paramd_service.exports.group import Leases, made, stored
from paramd_service.exports.machine import Export
from paramd_service.exports.store import ExportRow, File, FileState, TakenOverError

if TYPE_CHECKING:
    from paramd.layout.exports.plan import ExportPlan
    from paramd.mesh.exports.pins import PinnedExport
    from paramd_service.exports.incarnation import IncarnationExports

SAVE_EVERY_S: Final = 1.0
PER_RANK: Final = 1
"""Files that one sidecar writes at once: more would not make its disk faster."""
MAX_TRIES: Final = 3
"""Attempts per file for errors that may be transient."""
NOBODY_S: Final = 10.0
"""How long to wait for a writer while no rank is joined."""
PIN_S: Final = 60.0
"""How long to wait for boundaries at least."""
DROP_S: Final = 20.0

_LOOK_S: Final = 0.5
_TELL_S: Final = 5.0
_AGAIN_S: Final = 0.5
_SAVE_AGAIN_S: Final = 5.0

log = logging.getLogger("paramd.control.exports")

OnChange = Callable[["ExportJob", bool], None]
"""Change callback; the flag is False when only byte counts changed."""

Place = Callable[[ExportRow], export_pb2.ExportTarget]
"""Resolves an export's destination; raises UsageError or NotFoundError."""

_Task = asyncio.Task[export_pb2.ExportedFile]


class ExportJob:
    """State of one export. Use on one event loop."""

    def __init__(self, row: ExportRow, files: Sequence[File], queue: IncarnationExports) -> None:
        """No I/O. `files` are those in the store; none before a step is pinned."""
        self.row = row
        self.spec: ExportSpec = read_spec(row.request)
        self.export = Export(
            state=ExportState(row.state),
            reason=row.reason,
            incarnation=row.incarnation,
            step=row.step,
            files={file.name: file for file in files},
        )
        self.committing = False
        """True from the commit on, which may have made the export visible."""
        self.group = queue.group
        self.assets: Mapping[str, bytes] = {}
        """Contents of small files to copy into it, by name."""
        self.message = export_pb2.ExportPlan.FromString(row.plan)
        """The plan with its pins; empty before a step is pinned."""
        self.plan: ExportPlan | None = None
        self.leases: Leases | None = None
        self._queue = queue
        self._saved_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether a step was pinned, so that files may have been written."""
        return bool(self.row.plan)

    @property
    def target(self) -> export_pb2.ExportTarget:
        """Raises UsageError or NotFoundError when the destination no longer exists."""
        return self._queue.place(self.row)

    @property
    def files(self) -> list[File]:
        """Its files in their current state."""
        return list(self.export.files.values())

    async def named(self, incarnation: int, step: int) -> str:
        """Its destination, once its step is known. Raises StoreError."""
        taken: set[str] = set()
        if self.row.schedule:
            earlier = await self._queue.store.of_schedule(self.row.schedule)
            taken = {row.destination for row in earlier if not row.removed}
        return named_anew(self.row.destination, incarnation=incarnation, step=step, taken=taken)

    def change(self, export: Export) -> None:
        """Set a new state and report it to `on_change`."""
        whole = export.state is not self.export.state
        self.export = export
        self.row = replace(
            self.row,
            state=export.state,
            reason=export.reason,
            incarnation=export.incarnation,
            step=export.step,
        )
        self._queue.on_change(self, whole)

    def rank_lost(self, rank: int, why: str) -> None:
        """Treat a rank that does not answer, and the snapshot it held, as lost."""
        log.warning("export %s: rank %d is lost: %s", self.row.id, rank, why)
        self.change(machine.lost(self.export, rank, why=why))

    def hold(self, pins: Sequence[export_pb2.ExportPin]) -> Leases:
        """Take ownership of the pins' leases; they are released at the end."""
        self.leases = Leases(self.group, pins, self.rank_lost)
        return self.leases

    async def save(self) -> None:
        """Save all state.

        Raises:
            StoreError: When the store is unavailable.
            TakenOverError: When another control plane has taken over the export.
        """
        self._saved_s = time.monotonic()
        await self._queue.store.save(self.row, self.files)

    async def save_progress(self) -> None:
        """As `save`, at most once per SAVE_EVERY_S; errors of the store are only logged."""
        if time.monotonic() - self._saved_s < SAVE_EVERY_S:
            return
        try:
            await self.save()
        except StoreError as error:
            log.warning("progress of export %s could not be saved: %s", self.row.id, error)


class Writing:
    """Has sidecars write the files of one export."""

    def __init__(self, job: ExportJob) -> None:
        assert job.plan is not None
        self._job = job
        self._index = {file.name: number for number, file in enumerate(job.plan.files)}
        self._tasks: dict[_Task, tuple[str, int]] = {}
        self._tries: dict[str, int] = {}
        self._gone: set[str] = set()
        """Addresses that stopped answering; a respawned sidecar has a new address."""

    async def run(self) -> None:
        """Return when all files are written or the export has failed.

        Raises:
            UnreachableError: If no sidecar is left to write.
        """
        try:
            # One rank prepares the destination and checks that the files fit.
            job, size_bytes = self._job, self._job.export.size_bytes
            request = export_pb2.BeginExportRequest(target=job.target, size_bytes=size_bytes)
            await job.group.any(job.group.asking(request), lost=job.rank_lost)
            nobody_since_s = time.monotonic()
            while job.export.state is ExportState.RUNNING:
                self._give()
                if self._tasks:
                    nobody_since_s = time.monotonic()
                elif time.monotonic() - nobody_since_s > NOBODY_S:
                    raise UnreachableError("no sidecar is left to write the files")
                await self._wait()
        finally:
            await self._cancel(list(self._tasks))

    def _give(self) -> None:
        job, joined = self._job, self._job.group.ranks()
        ranks = {rank: address for rank, address in joined.items() if address not in self._gone}
        for name, rank in machine.next_files(job.export, ranks, per_rank=PER_RANK):
            job.change(machine.given(job.export, name, rank))
            task = asyncio.create_task(self._write(name, rank, ranks[rank]))
            self._tasks[task] = (name, rank)

    async def _write(self, name: str, rank: int, address: str) -> export_pb2.ExportedFile:
        job, joined = self._job, self._job.group.ranks()
        if self._tries.get(name):
            await asyncio.sleep(_AGAIN_S)
        request = export_pb2.WriteExportFileRequest(
            target=job.target, plan=job.message, file=self._index[name]
        )
        wanted = sorted(job.export.files[name].sources - {rank})
        sources = [(source, joined[source]) for source in wanted if source in joined]
        return await made(
            job.group.calls,
            rank,
            address,
            request,
            sources=sources,
            moved=lambda size: job.change(machine.moved(job.export, name, size)),
            timeout_s=job.spec.timeout_s,
        )

    async def _wait(self) -> None:
        if self._tasks:
            done, _ = await asyncio.wait(
                self._tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                self._ended(task, *self._tasks.pop(task))
        else:
            await asyncio.sleep(_LOOK_S)
        # A file whose rank was lost is assigned again; the call to that rank may still be open.
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
        except RankUnreachableError as error:
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
            wrote = f"rank {rank} wrote {found.size_bytes:,} bytes to {found.name!r}"
            raise ConflictError(f"{wrote}; expected {size_bytes:,} bytes to {name!r}")
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


async def begin(job: ExportJob) -> None:
    """Plan the export and pin one step; saved before any byte is written.

    Raises:
        ParamdError: If planning, pinning or saving failed.
    """
    from paramd.layout.exports.plan import plan_export
    from paramd.mesh.exports.pins import encode_plan

    await job.group.wait_for()
    digest, layout = await job.group.layout()
    plan = await asyncio.to_thread(plan_export, layout, job.spec.settings)
    own = {file.name for file in plan.files} | ({ADAPTER_CONFIG} if plan.config else set())
    clash = own & set(job.assets)
    if clash:
        raise UsageError(f"assets: {min(clash)!r} is also the name of a file of the export")
    pinned = await _pinned(job, plan)
    plan, pins, state = pinned.plan, pinned.pins, pinned.pinned.state
    leases = job.hold(pins)
    await leases.renew()
    leases.keep()
    job.plan = plan
    job.message = encode_plan(pinned, digest)
    job.row = replace(
        job.row,
        plan=job.message.SerializeToString(),
        destination=await job.named(state.incarnation, state.step),
    )
    job.change(
        machine.planned(
            job.export,
            incarnation=state.incarnation,
            step=state.step,
            files=[_file(plan, index) for index in range(len(plan.files))],
        )
    )
    await job.save()


async def _pinned(job: ExportJob, plan: ExportPlan) -> PinnedExport:
    telling = asyncio.create_task(_tell_waits(job), name="paramd-export-waits")
    optimizer = job.spec.optimizer or plan.needs_optimizer
    patience_s = _patience_s(job.group.mesh.registry.view(), job.spec.timeout_s)
    try:
        return await job.group.pin(plan, timeout_s=patience_s, optimizer=optimizer)
    except DeadlineError as error:
        if plan.layout.mirrored or not (plan.at_boundary or optimizer):
            raise
        raise DeadlineError(
            f"no boundary of all ranks within {patience_s:.0f} s, waiting for "
            f"{waited_for(job.group.mesh.registry.view())}: {error}; while training is stopped, "
            "only parameters can be exported (--include parameters): they need no boundary"
        ) from error
    finally:
        await ended(telling)


def _patience_s(view: MeshView, most_s: float) -> float:
    """How long to wait for boundaries. What kinds of state there are is read first, and agreeing on
    a boundary takes up to two steps: with one miss that is six of the slowest rank's steps.
    """
    steps_s = 8e-9 * max((one.state.step_time_ns for one in view.joined), default=0)
    return min(max(PIN_S, steps_s), most_s)


async def _tell_waits(job: ExportJob) -> None:
    """Report now and then on whom it waits."""
    while True:
        await asyncio.sleep(_TELL_S)
        reason = f"waits for {waited_for(job.group.mesh.registry.view())}"
        if reason != job.export.reason:
            job.change(replace(job.export, reason=reason))


async def adopt(job: ExportJob) -> None:
    """Resume an export of an earlier control plane if its snapshots are still leased.

    Raises:
        ParamdError: As `begin` does.
        ConflictError: If it cannot be resumed.
    """
    pins = list(job.message.pins)
    lives = job.message.incarnation == job.group.mesh.number
    if lives:
        await job.group.wait_for(pin.rank for pin in pins)
    leases = job.hold(pins)
    if lives and job.export.state is ExportState.RUNNING:
        try:
            await leases.renew()
            leases.keep()
        except NotFoundError:
            lives = False
    export, why = machine.after_restart(
        job.export, incarnation=job.group.mesh.number, snapshot_lives=lives
    )
    log.info("export %s resumed as %s: %s", job.row.id, export.state, why)
    job.change(export)
    if export.state is ExportState.RUNNING:
        await _replan(job)
    await job.save()


async def _replan(job: ExportJob) -> None:
    from paramd.mesh.exports.pins import decode_plan

    digest, layout = await job.group.layout()
    if digest != job.message.layout_digest:
        raise ConflictError("the job's layout has changed since the export began; export again")
    plan = job.plan = await asyncio.to_thread(decode_plan, job.message, layout)
    planned = [_file(plan, index) for index in range(len(plan.files))]
    files = {
        file.name: replace(job.export.files[file.name], sources=file.sources) for file in planned
    }
    job.change(replace(job.export, files=files))


def _file(plan: ExportPlan, index: int) -> File:
    file = plan.files[index]
    ranks: set[int] = set()
    for entry in file.entries:
        if entry.tensor >= 0:
            tensor = plan.sources[entry.state_key].tensors[entry.tensor]
            ranks.update(piece.rank for piece in tensor.pieces)
    return File(
        name=file.name, size_bytes=file.size_bytes, rank=file.rank, sources=frozenset(ranks)
    )


async def finish(job: ExportJob) -> None:
    """Store the assets, verify all files and commit. Idempotent.

    Raises:
        DataLossError: If a file read back differs from what was written.
        ParamdError: If the destination failed.
    """
    files = [
        export_pb2.ExportedFile(
            name=file.name, size_bytes=file.size_bytes, xxh3=bytes.fromhex(file.checksum)
        )
        for file in job.export.files.values()
    ]
    for name, data in job.assets.items():
        store = partial(stored, job.group.calls, target=job.target, name=name, data=data)
        files.append((await job.group.any(store))[1])
    if job.spec.verify:
        await _verify(job, files)
    job.committing = True
    request = export_pb2.FinishExportRequest(
        target=job.target, plan=job.message, files=files, created_s=job.row.created_s
    )
    rank, answer = await job.group.any(job.group.asking(request))
    beside = [
        File(
            name=one.name,
            size_bytes=one.size_bytes,
            written_bytes=one.size_bytes,
            rank=rank,
            state=FileState.VERIFIED,
            checksum=one.xxh3.hex(),
        )
        for one in answer.files
        if one.name not in job.export.files
    ]
    job.change(machine.committed(job.export, beside))


async def _verify(job: ExportJob, files: Sequence[export_pb2.ExportedFile]) -> None:
    shares: dict[int, list[export_pb2.ExportedFile]] = {}
    for file in files:
        known = job.export.files.get(file.name)
        shares.setdefault(known.rank if known is not None else 0, []).append(file)
    await all_of(_verify_share(job, rank, share) for rank, share in shares.items())


async def _verify_share(
    job: ExportJob, rank: int, files: Sequence[export_pb2.ExportedFile]
) -> None:
    for file in files:
        request = export_pb2.VerifyExportFileRequest(target=job.target, name=file.name)
        verify = partial(made, job.group.calls, request=request, timeout_s=job.spec.timeout_s)
        _, found = await job.group.any(verify, first=rank)
        if (found.size_bytes, found.xxh3) != (file.size_bytes, file.xxh3):
            read = f"read back as {found.size_bytes:,} bytes with checksum {found.xxh3.hex()}"
            was = f"written as {file.size_bytes:,} with {file.xxh3.hex()}"
            raise DataLossError(f"{file.name} was {read}, but {was}: the destination corrupts data")
        if file.name in job.export.files:
            job.change(machine.verified(job.export, file.name))
            await job.save_progress()


async def drop(job: ExportJob) -> bool:
    """Remove an export's files, committed or not; return whether that succeeded."""
    try:
        names = list(job.export.files)
        request = export_pb2.DropExportRequest(target=job.target, names=names, finished=True)
        waiting = export_pb2.DropExportRequest(wait_only=True)
        waiting.MergeFrom(request)
        async with asyncio.timeout(DROP_S):
            # First wait for all writers, or one could write a file after it was removed.
            await job.group.all(job.group.asking(waiting))
            await job.group.any(job.group.asking(request), wait=False)
    except (ParamdError, TimeoutError) as error:
        log.warning("export %s: its files could not be removed: %s", job.row.id, error)
        return False
    return True


class ExportRun(ExportJob):
    """An export and its task: `run` once; `cancel` and `fail` at any time."""

    def __init__(self, row: ExportRow, files: Sequence[File], queue: IncarnationExports) -> None:
        """No I/O. Args: as `ExportJob`."""
        super().__init__(row, files, queue)
        self.asked_to_end = asyncio.Event()
        """Set by `cancel` and `fail`."""
        self.over = asyncio.Event()
        """Set when the queue has stopped running it."""
        self._work: asyncio.Task[None] | None = None
        self._ending: tuple[ExportState, str] | None = None

    def fail(self, reason: str) -> None:
        """End it as FAILED, unless it is being committed."""
        if not self.committing:
            self._end(ExportState.FAILED, reason)

    def cancel(self, reason: str) -> None:
        """End it as CANCELLED. Idempotent.

        Raises:
            ConflictError: If it has ended or is being committed.
        """
        if self.export.is_over or self.committing:
            now = f"export {self.row.id} is {self.export.state}"
            raise ConflictError(f"{now}; it can no longer be cancelled")
        self._end(ExportState.CANCELLED, reason)

    def _end(self, state: ExportState, reason: str) -> None:
        self._ending = self._ending if self._ending is not None else (state, reason)
        self.asked_to_end.set()
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """Run it to its end; errors end it as FAILED, except TakenOverError, which is raised.
        Cancelling this call stops without ending the export, as if the process had died: leases are
        kept, and the next control plane resumes it."""
        name = f"paramd-export-{self.row.id[:8]}"
        work = self._work = asyncio.create_task(self._timed(), name=name)
        if self._ending is not None:
            work.cancel()
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            if self.leases is not None:
                await self.leases.close(release=False)
            raise
        error = work.exception() if not work.cancelled() else None
        if isinstance(error, TakenOverError):
            if self.leases is not None:
                await self.leases.close(release=False)
            raise error
        self._ended(error)
        await self._clean_up()
        await self._keep_end()

    async def _timed(self) -> None:
        limit_s = self.spec.timeout_s
        left_s = limit_s - (now_s() - self.row.created_s)
        timer = asyncio.timeout(max(left_s, 0.0))
        try:
            async with timer:
                await self._stages()
        except TimeoutError:
            if not timer.expired():
                raise
            why = f"it did not finish within {limit_s:g} s; allow more (timeout=)"
            raise DeadlineError(why) from None

    async def _stages(self) -> None:
        await (adopt(self) if self.has_begun else begin(self))
        if self.export.state is ExportState.RUNNING:
            await Writing(self).run()
        if self.export.is_over:
            return
        await self.save()
        assert self.leases is not None
        # All bytes are written: the snapshots are no longer needed.
        await self.leases.close(release=True)
        await finish(self)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            reason = str(error)
            if not isinstance(error, ParamdError):
                log.error("export %s failed with an internal error", self.row.id, exc_info=error)
                told = type(error).__name__
                reason = f"internal error ({told}); see the control plane's log"
            self.change(machine.failed(self.export, reason))
        elif self._ending is not None:
            state, reason = self._ending
            end = machine.cancelled if state is ExportState.CANCELLED else machine.failed
            self.change(end(self.export, reason))
        self.row = replace(self.row, ended_s=time.time())
        now = self.row.id, self.row.destination, self.row.step, self.row.state, self.row.reason
        log.info("export %s to %s, step %d: %s %s", *now)

    async def _clean_up(self) -> None:
        if self.leases is not None:
            await self.leases.close(release=True)
        if self.export.state is not ExportState.DONE and self.has_begun:
            # A commit without an answer, or of an earlier control plane, may have made it visible.
            self.row = replace(self.row, drop_owed=not await drop(self))

    async def _keep_end(self) -> None:
        while True:
            try:
                return await self.save()
            except StoreError as error:
                log.warning("the end of export %s is not saved yet: %s", self.row.id, error)
                await asyncio.sleep(_SAVE_AGAIN_S)
