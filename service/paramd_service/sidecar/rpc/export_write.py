"""One file of an export: batch after batch from snapshots into a sink.

While a thread fills and writes one batch, the bytes of the next one come from peers. What
is held in memory: a batch, what was fetched for the next one, and the sink's own buffers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import xxhash

from paramd.errors import DataLossError
from paramd.layout.exports.files import ExportFile
from paramd.layout.exports.plan import ExportPlan
from paramd.v1 import export_pb2
from paramd.wire import CHUNK_BYTES, data_chunk
from paramd_service.aio import all_of, uncancelled
from paramd_service.destinations.place import FileSink, Place
from paramd_service.formats.batches import Batch, batches
from paramd_service.formats.filling import Filler, Memory, extents_to_fetch
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.export_sources import PeerMemory

PREFETCH_BYTES = 16 << 20
"""Most bytes fetched ahead; what is more is fetched when its turn comes."""

Result = TypeVar("Result")
Emit = Callable[[memoryview], None]
"""Takes the file's next bytes, in a thread."""


@dataclass(frozen=True, slots=True)
class Job:
    """One file to be made."""

    plan: ExportPlan
    file: ExportFile
    memories: Mapping[tuple[int, str], Memory]


class Worker:
    """A thread that fills and writes; its work is awaited, also when cancelled."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "paramd-export")

    async def run(self, work: Callable[[], Result]) -> Result:
        # Else it would go on writing into what its owner lets go of.
        loop = asyncio.get_running_loop()
        return await uncancelled(loop.run_in_executor(self._executor, work))

    def close(self) -> None:
        self._executor.shutdown(wait=False)


async def make_file(
    rank: RankSidecar, job: Job, worker: Worker, emit: Emit, *, offset_bytes: int = 0
) -> AsyncGenerator[int, None]:
    """Emits the file's bytes from `offset_bytes` on; yields how far it is after each batch.

    Raises:
        ParamdError: a peer is gone, a lease ended; what `emit` raises.
    """
    header = job.file.header
    head = memoryview(header)[min(offset_bytes, len(header)) :]
    await worker.run(lambda: emit(head))
    position, first = _first_entry(job.file, offset_bytes)
    filler = Filler()
    left = batches(job.plan, job.file, first_entry=first)
    batch = next(left, None)
    fetched = await _fetch(job, batch) if batch is not None else {}
    while batch is not None:
        following = next(left, None)
        fetching = asyncio.ensure_future(_fetch(job, following if following is not None else ()))
        try:
            skip = max(offset_bytes - position, 0)
            work = partial(_emit_batch, filler, batch, job, fetched, emit, skip)
            await worker.run(work)
            rank.faults.at("export-chunk")
            position += sum(window.size_bytes for window in batch)
            fetched = await fetching
        finally:
            await _ended(fetching)
        yield position
        batch = following


def _emit_batch(
    filler: Filler,
    batch: Batch,
    job: Job,
    fetched: Mapping[tuple[int, int], memoryview],
    emit: Emit,
    skip: int,
) -> None:
    for piece in filler.pieces(batch, job.memories, fetched):
        emit(piece[min(skip, len(piece)) :])
        skip = max(skip - len(piece), 0)


def _first_entry(file: ExportFile, offset_bytes: int) -> tuple[int, int]:
    """Where the entry that holds `offset_bytes` begins, and its number."""
    begin = len(file.header)
    for number, entry in enumerate(file.entries):
        if begin + entry.size_bytes > offset_bytes:
            return begin, number
        begin += entry.size_bytes
    return begin, len(file.entries)


async def _fetch(job: Job, batch: Batch) -> dict[tuple[int, int], memoryview]:
    """What the batch needs of peers elsewhere; nothing when that is too much at once."""
    wanted = extents_to_fetch(
        batch,
        lambda extent: isinstance(job.memories[extent.rank, extent.state_key], PeerMemory),
    )
    if not wanted or sum(extent.size_bytes for _, extent in wanted) > PREFETCH_BYTES:
        return {}
    found: dict[tuple[int, int], memoryview] = {}

    async def one_peer(source: tuple[int, str]) -> None:
        memory = job.memories[source]
        assert isinstance(memory, PeerMemory)
        for at, extent in wanted:
            if (extent.rank, extent.state_key) == source:
                found[at] = await memory.read(extent.begin_bytes, extent.size_bytes)

    sources = {(extent.rank, extent.state_key) for _, extent in wanted}
    await all_of(one_peer(source) for source in sources)
    return found


async def _ended(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


class Digesting:
    """A file's checksum and size, as its bytes pass."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.size_bytes = 0

    def update(self, data: memoryview) -> None:
        self._hash.update(data)
        self.size_bytes += len(data)

    def file(self, name: str) -> export_pb2.ExportedFile:
        return export_pb2.ExportedFile(
            name=name, size_bytes=self.size_bytes, xxh3=self._hash.digest()
        )


async def write_file(
    rank: RankSidecar, job: Job, place: Place
) -> AsyncGenerator[int | export_pb2.ExportedFile, None]:
    """Writes a file to its place; yields bytes written, and the file at last.

    What was written is removed when this ends early, whatever ends it.

    Raises:
        ParamdError: as `make_file`, and what the place says.
    """
    worker, digesting = Worker(), Digesting()
    sink: FileSink | None = None
    try:
        create = partial(place.create, job.file.name, job.file.size_bytes)
        sink = await worker.run(create)
        rank.faults.at("export-file-begun")
        emit = partial(_pass_on, sink, digesting, place)
        async with aclosing(make_file(rank, job, worker, emit)) as progress:
            async for written in progress:
                yield written
        if digesting.size_bytes != job.file.size_bytes:
            raise DataLossError(
                f"{job.file.name}: {digesting.size_bytes:,} bytes were made, planned were "
                f"{job.file.size_bytes:,}"
            )
        rank.faults.at("export-file-written")
        await worker.run(partial(_finish, sink, place))
        sink = None
        rank.faults.at("export-file-done")
        yield digesting.file(job.file.name)
    finally:
        if sink is not None:
            await worker.run(sink.abort)
        worker.close()


async def stream_file(
    rank: RankSidecar, job: Job, offset_bytes: int
) -> AsyncGenerator[bytes, None]:
    """The chunks of a file, as messages, from `offset_bytes` on. Raises as `make_file`."""
    worker, made = Worker(), bytearray()
    at = offset_bytes
    try:
        progress = make_file(rank, job, worker, made.extend, offset_bytes=offset_bytes)
        async with aclosing(progress):
            while True:
                end = await anext(progress, None)
                for begin in range(0, len(made), CHUNK_BYTES):
                    part = bytes(made[begin : begin + CHUNK_BYTES])
                    yield data_chunk(memoryview(part), at)
                    at += len(part)
                made.clear()
                if end is None:
                    return
    finally:
        worker.close()


def _pass_on(sink: FileSink, digesting: Digesting, place: Place, data: memoryview) -> None:
    digesting.update(data)
    try:
        sink.write(data)
    except OSError as error:
        raise place.explain(error) from error


def _finish(sink: FileSink, place: Place) -> None:
    try:
        sink.finish()
    except OSError as error:
        raise place.explain(error) from error
