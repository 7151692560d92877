"""One file of an export: batch after batch from snapshots into a sink.

The snapshots are this sidecar's, those of sidecars on this host, and those of remote peers, read
with the ticket of the control plane that requested the file. While a thread fills and writes one
batch, the peers' bytes of the next one arrive. Memory holds a batch, the bytes fetched for the next
one, and the sink's buffers.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from paramd.errors import (
    ConflictError,
    DataLossError,
    DeniedError,
    ExhaustedError,
    UnreachableError,
    UsageError,
)
from paramd.layout.exports.files import ExportFile
from paramd.layout.exports.plan import ExportPlan
from paramd.mesh.peers.sidecars import Pinned, RankPin, Sidecars
from paramd.mesh.reading.ops import is_same_host
from paramd.mesh.reading.stream import Reading, read_bytes
from paramd.mesh.reading.transfer import SharedSnapshot
from paramd.state import StateName
from paramd.v1 import export_pb2
from paramd_service.aio import all_of, ended, in_executor
from paramd_service.destinations.destinations import FileSink, Place
from paramd_service.formats.filling import Batch, Filler, Memory, batches
from paramd_service.sidecar.calls import handed_over
from paramd_service.sidecar.parts import SidecarHost
from paramd_service.sidecar.rpc.peers import Peers

SEGMENT_BYTES = 4 << 20
"""Bytes fetched from a peer at once, and kept for each: about the window of a gRPC stream."""

_READ_S = 60.0
_TRIES = 4
_PAUSE_S = 0.2
_SMALL_BYTES = 64 << 10


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy; large copies go through numpy, which releases the GIL."""
    if len(target) < _SMALL_BYTES:
        target[:] = source
        return
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class OwnMemory:
    """A snapshot of this sidecar; the caller must hold it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        copy_bytes(target, self.view(offset_bytes, len(target)))

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        return self._memory[offset_bytes : offset_bytes + size_bytes]


class HostMemory:
    """A snapshot of a peer on this host, mapped by its descriptor."""

    def __init__(self, shared: SharedSnapshot) -> None:
        self._shared = shared

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        self._shared.read_into(address, offset_bytes, len(target))

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview | None:
        return None


class PeerMemory:
    """A snapshot of a remote peer, fetched in segments: reads are mostly sequential."""

    def __init__(self, reading: Reading, pin: RankPin) -> None:
        """`reading` is used for its bytes, with other deadlines."""
        self._reading = reading
        self._pin = pin
        self._loop = asyncio.get_running_loop()
        self._begin = 0
        self._segment = memoryview(b"")
        self._lock = asyncio.Lock()

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        work = self.read(offset_bytes, len(target))
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        target[:] = running.result(_READ_S * _TRIES)

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview | None:
        return None

    async def read(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """The bytes [offset, offset + size).

        Raises:
            ParamdError: If the peer is gone, its lease ended, or its bytes are wrong.
        """
        async with self._lock:
            end = offset_bytes + size_bytes
            if not self._begin <= offset_bytes <= end <= self._begin + len(self._segment):
                until = min(offset_bytes + max(size_bytes, SEGMENT_BYTES), self._pin.size_bytes)
                self._segment = memoryview(await self._fetched(offset_bytes, until))
                self._begin = offset_bytes
            return self._segment[offset_bytes - self._begin : end - self._begin]

    async def _fetched(self, begin: int, end: int) -> bytearray:
        for tries in range(1, _TRIES + 1):
            reading = replace(self._reading, deadline_s=time.monotonic() + _READ_S)
            try:
                return await read_bytes(reading, self._pin.rank, begin, end)
            except ExhaustedError:
                # Other ranks read there, too: each call takes one of the peer's slots.
                if tries == _TRIES:
                    raise
            await asyncio.sleep(_PAUSE_S * tries)
        raise AssertionError("the last try returns or raises")


class Memories:
    """All snapshots of one plan, opened and released together."""

    def __init__(self, rank: SidecarHost, plan: ExportPlan, message: export_pb2.ExportPlan) -> None:
        self._rank = rank
        self._plan = plan
        self._message = message
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> dict[tuple[int, str], Memory]:
        """Open the snapshots; return them by rank and state key. Raises UsageError: the message
        lacks a snapshot of the plan. NotFoundError: a snapshot's lease on this host has ended."""
        # Taken here: the threads that read have no context of the call.
        reads = handed_over()
        self._peers = peers = Peers(self._rank, self._rank.ready_mesh(), lambda: reads)
        self._stack.push_async_callback(peers.close)
        pins = {(pin.rank, pin.state_key): pin.snapshot_id for pin in self._message.pins}
        found: dict[tuple[int, str], Memory] = {}
        try:
            sidecars = await peers.sidecars()
            for key, source in self._plan.sources.items():
                for rank, spans in source.spans.items():
                    if (rank, key) not in pins:
                        raise UsageError(
                            f"pins: no snapshot of rank {rank} for {key or 'parameters'!r}"
                        )
                    size_bytes = sum(end - begin for begin, end in spans)
                    found[rank, key] = await self._open(sidecars, rank, pins[rank, key], size_bytes)
        except BaseException:
            await self._stack.aclose()
            raise
        return found

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(
        self, sidecars: Sidecars, number: int, snapshot_id: str, size_bytes: int
    ) -> Memory:
        found = self._message
        state = StateName(found.incarnation, found.history, found.step, found.edits)
        if number == self._rank.config.rank:
            return self._own(snapshot_id, size_bytes, state)
        peer = sidecars.document.peers.get(number)
        if peer is None:
            raise UsageError(f"pins: rank {number} is not in this mesh")
        if is_same_host(peer):
            ticket = self._peers.ticket(number)
            try:
                shared = await asyncio.to_thread(SharedSnapshot.open, peer, ticket, snapshot_id)
            except (UnreachableError, DeniedError):
                pass  # perhaps another container: read over the network
            else:
                self._stack.callback(shared.close)
                self._check(snapshot_id, shared.state, shared.boundary_token, state)
                return HostMemory(shared)
        pin = RankPin(number, snapshot_id, state, size_bytes, lease_s=0.0)
        pinned = Pinned(state, {number: pin}, boundary_token=found.boundary_token)
        return PeerMemory(Reading(sidecars, pinned, 0.0, "grpc"), pin)

    def _check(self, snapshot_id: str, state: StateName, token: int, planned: StateName) -> None:
        """Raise ConflictError unless the snapshot is of the plan's state and boundary."""
        if (state, token) != (planned, self._message.boundary_token):
            raise ConflictError(
                f"snapshot {snapshot_id[:8]} is of {state}; the plan is of {planned}, at the "
                "boundary that was agreed on for it"
            )

    def _own(self, snapshot_id: str, size_bytes: int, state: StateName) -> OwnMemory:
        store = self._rank.pins.store
        snapshot = store.filled(snapshot_id)
        if snapshot.size_bytes != size_bytes:
            raise ConflictError(
                f"snapshot {snapshot_id[:8]} holds {snapshot.size_bytes:,} bytes; the plan has "
                f"{size_bytes:,}"
            )
        self._check(snapshot_id, snapshot.state, snapshot.token, state)
        store.hold(snapshot)
        self._stack.callback(store.drop, snapshot)
        return OwnMemory(snapshot.view())


PREFETCH_BYTES = 16 << 20
"""Most bytes fetched ahead; a batch that needs more fetches while it is filled."""

Emit = Callable[[memoryview], None]
"""Receives the file's next bytes, on a thread."""


@dataclass(frozen=True, slots=True)
class Job:
    """One file to make."""

    plan: ExportPlan
    file: ExportFile
    memories: Mapping[tuple[int, str], Memory]


async def make_file(
    rank: SidecarHost, job: Job, worker: Executor, emit: Emit
) -> AsyncGenerator[int, None]:
    """Emit the file's bytes; yield the position after each batch.

    Raises:
        ParamdError: If a peer is gone, a lease ended, or `emit` raised it.
    """
    header = job.file.header
    await in_executor(worker, lambda: emit(memoryview(header)))
    position = len(header)
    filler = Filler(job.memories)
    left = batches(job.plan, job.file)
    batch = next(left, None)
    fetched = await _fetch(job, batch) if batch is not None else {}
    try:
        while batch is not None:
            following = next(left, None)
            fetching = asyncio.ensure_future(
                _fetch(job, following if following is not None else ())
            )
            try:
                await in_executor(worker, partial(_emit_batch, filler, batch, fetched, emit))
                rank.faults.at("export-chunk")
                position += sum(window.size_bytes for window in batch)
                fetched = await fetching
            finally:
                await ended(fetching)
            yield position
            batch = following
    finally:
        filler.close()


def _emit_batch(
    filler: Filler, batch: Batch, fetched: Mapping[tuple[int, int], memoryview], emit: Emit
) -> None:
    for piece in filler.pieces(batch, fetched):
        emit(piece)


async def _fetch(job: Job, batch: Batch) -> dict[tuple[int, int], memoryview]:
    """Fetch the batch's bytes from remote peers; none if they exceed `PREFETCH_BYTES`."""
    wanted = [
        ((number, at), extent)
        for number, window in enumerate(batch)
        for at, extent in enumerate(window.reads)
        if isinstance(job.memories[extent.rank, extent.state_key], PeerMemory)
    ]
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


class Digesting:
    """Running checksum and size of a file."""

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
    rank: SidecarHost, job: Job, place: Place
) -> AsyncGenerator[int | export_pb2.ExportedFile, None]:
    """Write a file to its place; yield bytes written so far, finally the file. If it ends early,
    for any reason, the part written is removed. Raises as `make_file`, or from the place."""
    # Awaited even when cancelled, or it would continue to use what its owner releases.
    worker, digesting = ThreadPoolExecutor(1, "paramd-export"), Digesting()
    sink: FileSink | None = None
    try:
        create = partial(place.create, job.file.name, job.file.size_bytes)
        sink = await in_executor(worker, create)
        rank.faults.at("export-file-begun")
        emit = partial(_pass_on, sink, digesting)
        async with aclosing(make_file(rank, job, worker, emit)) as progress:
            async for written in progress:
                yield written
        if digesting.size_bytes != job.file.size_bytes:
            raise DataLossError(
                f"{job.file.name}: {digesting.size_bytes:,} bytes written, {job.file.size_bytes:,} "
                "planned"
            )
        rank.faults.at("export-file-written")
        await in_executor(worker, sink.finish)
        sink = None
        rank.faults.at("export-file-done")
        yield digesting.file(job.file.name)
    finally:
        if sink is not None:
            await in_executor(worker, sink.abort)
        worker.shutdown(wait=False)


def _pass_on(sink: FileSink, digesting: Digesting, data: memoryview) -> None:
    digesting.update(data)
    sink.write(data)
