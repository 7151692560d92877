"""One file of an export: batch after batch from snapshots into a sink.

The snapshots are our own, those of sidecars on this host, and those of peers elsewhere, read
with the ticket of the control plane that asked for the file. While a thread fills and writes one
batch, the peers' bytes of the next one arrive. In memory at once: a batch, what was fetched for
the next one, and the sink's own buffers.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import cast

import grpc.aio
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
from paramd.mesh.peers.control import PeerAddress
from paramd.mesh.peers.grpc import Asked, Channels, check_way, error_of
from paramd.mesh.reading.transfer import SharedSnapshot, is_same_host
from paramd.v1 import export_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import Chunk
from paramd_service.aio import all_of, ended, in_executor
from paramd_service.destinations.destinations import FileSink, Place
from paramd_service.formats.filling import Batch, Filler, Memory, batches
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.auth import CALLER_TICKET

SEGMENT_BYTES = 32 << 20
"""Requested from a peer at once: reads are mostly sequential."""

_SKIP_BYTES = 1 << 20
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
    """A snapshot of a remote peer; sequential reads continue one stream."""

    def __init__(
        self,
        channels: Channels,
        asked: Asked,
        snapshot_id: str,
        size_bytes: int,
        state: tuple[int, int],
    ) -> None:
        """`state` is the expected (incarnation, step)."""
        self._channels = channels
        self._asked = asked
        self._who = asked.who
        self._snapshot_id = snapshot_id
        self._size_bytes = size_bytes
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._stream: AsyncGenerator[Chunk, None] | None = None
        self._rest = memoryview(b"")
        self._at = 0
        """Offset of the first byte of `_rest`."""
        self._end = 0
        """Offset where the stream ends."""
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
            ParamdError: the peer is gone, its lease ended, or its bytes are wrong.
        """
        async with self._lock:
            found = memoryview(bytearray(size_bytes))
            filled = tries = 0
            while filled < size_bytes:
                try:
                    filled += await self._some(found[filled:], offset_bytes + filled)
                    tries = 0
                except (UnreachableError, ExhaustedError, DataLossError):
                    await self._drop()
                    tries += 1
                    if tries == _TRIES:
                        raise
                    await asyncio.sleep(_PAUSE_S * tries)
            return found

    async def close(self) -> None:
        """End the stream."""
        async with self._lock:
            await self._drop()

    async def _some(self, target: memoryview, offset: int) -> int:
        """Some bytes from `offset` on, at least one."""
        near = self._at <= offset <= self._at + len(self._rest) + _SKIP_BYTES
        if self._stream is None or not near or offset >= self._end:
            await self._begin(offset, len(target))
        while self._at + len(self._rest) <= offset:
            await self._next()
        self._rest = self._rest[offset - self._at :]
        size = min(len(target), len(self._rest))
        target[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        self._at = offset + size
        return size

    async def _begin(self, offset: int, size_bytes: int) -> None:
        await self._drop()
        self._end = min(offset + max(size_bytes, SEGMENT_BYTES), self._size_bytes)
        request = pb.ReadSnapshotRequest(
            snapshot_id=self._snapshot_id, offset_bytes=offset, size_bytes=self._end - offset
        )
        stream = self._channels.read(self._asked, request, timeout_s=_READ_S)
        self._stream = cast("AsyncGenerator[Chunk, None]", stream)
        self._at = offset
        self._rest = memoryview(b"")

    async def _next(self) -> None:
        assert self._stream is not None
        try:
            chunk = await anext(self._stream)
        except StopAsyncIteration:
            raise DataLossError(f"{self._who}: its stream ended early") from None
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._who) from error
        if chunk.header is not None:
            if (chunk.header.incarnation, chunk.header.step) != self._state:
                raise ConflictError(f"{self._who} sent another step than the pinned one")
            return
        chunk.check()
        if chunk.offset_bytes != self._at + len(self._rest):
            raise DataLossError(f"{self._who} sent bytes that were not requested")
        self._at = chunk.offset_bytes
        self._rest = chunk.data

    async def _drop(self) -> None:
        stream, self._stream = self._stream, None
        self._rest = memoryview(b"")
        if stream is not None:
            await stream.aclose()


class Memories:
    """All snapshots of one plan, opened and released together."""

    def __init__(self, rank: RankSidecar, plan: ExportPlan, message: export_pb2.ExportPlan) -> None:
        self._rank = rank
        self._plan = plan
        self._message = message
        self._channels = Channels(CALLER_TICKET.get, job_tls=rank.job_tls)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> dict[tuple[int, str], Memory]:
        """Open the snapshots; return them by rank and state key.

        Raises:
            UsageError: the message lacks a snapshot of the plan.
            NotFoundError: the lease of a snapshot on this host has ended.
        """
        self._stack.push_async_callback(self._channels.close)
        pins = {(pin.rank, pin.state_key): pin.snapshot_id for pin in self._message.pins}
        found: dict[tuple[int, str], Memory] = {}
        try:
            for key, source in self._plan.sources.items():
                for rank, spans in source.spans.items():
                    if (rank, key) not in pins:
                        raise UsageError(
                            f"pins: no snapshot of rank {rank} for {key or 'parameters'!r}"
                        )
                    size_bytes = sum(end - begin for begin, end in spans)
                    found[rank, key] = await self._open(rank, pins[rank, key], size_bytes)
        except BaseException:
            await self._stack.aclose()
            raise
        return found

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(self, number: int, snapshot_id: str, size_bytes: int) -> Memory:
        if number == self._rank.config.rank:
            return self._own(snapshot_id, size_bytes)
        peers = {peer.rank: peer for peer in self._rank.ready_mesh().peers}
        info = peers.get(number)
        if info is None:
            raise UsageError(f"pins: rank {number} is not in this mesh")
        peer = PeerAddress(number, info.address, info.socket_path, info.host_id)
        if is_same_host(peer):
            ticket = CALLER_TICKET.get()
            try:
                shared = await asyncio.to_thread(SharedSnapshot.open, peer, ticket, snapshot_id)
            except (UnreachableError, DeniedError):
                pass  # perhaps another container: read over the network
            else:
                self._stack.callback(shared.close)
                return HostMemory(shared)
        check_way(number, info.address, info.host_id)
        asked = Asked(
            job=self._rank.config.job,
            incarnation=self._rank.incarnation,
            rank=number,
            address=info.address,
        )
        memory = PeerMemory(
            self._channels,
            asked,
            snapshot_id,
            size_bytes,
            (self._message.incarnation, self._message.step),
        )
        self._stack.push_async_callback(memory.close)
        return memory

    def _own(self, snapshot_id: str, size_bytes: int) -> OwnMemory:
        store = self._rank.pins.store
        snapshot = store.filled(snapshot_id)
        if snapshot.size_bytes != size_bytes or snapshot.step != self._message.step:
            raise ConflictError(
                f"snapshot {snapshot_id[:8]} holds {snapshot.size_bytes:,} bytes of step "
                f"{snapshot.step}; the plan has {size_bytes:,} of step {self._message.step}"
            )
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
    rank: RankSidecar, job: Job, worker: Executor, emit: Emit
) -> AsyncGenerator[int, None]:
    """Emit the file's bytes; yield the position after each batch.

    Raises:
        ParamdError: a peer is gone, a lease ended, or `emit` raised it.
    """
    header = job.file.header
    await in_executor(worker, lambda: emit(memoryview(header)))
    position = len(header)
    filler = Filler(job.memories)
    left = batches(job.plan, job.file)
    batch = next(left, None)
    fetched = await _fetch(job, batch) if batch is not None else {}
    while batch is not None:
        following = next(left, None)
        fetching = asyncio.ensure_future(_fetch(job, following if following is not None else ()))
        try:
            await in_executor(worker, partial(_emit_batch, filler, batch, fetched, emit))
            rank.faults.at("export-chunk")
            position += sum(window.size_bytes for window in batch)
            fetched = await fetching
        finally:
            await ended(fetching)
        yield position
        batch = following


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
        for at, extent in enumerate(window.extents)
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
    rank: RankSidecar, job: Job, place: Place
) -> AsyncGenerator[int | export_pb2.ExportedFile, None]:
    """Write a file to its place; yield bytes written so far, finally the file.

    If it ends early, for any reason, what was written is removed.

    Raises:
        ParamdError: as `make_file`, or from the place.
    """
    # Awaited even when cancelled, or it would go on using what its owner releases.
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
