"""The snapshots that an export's files are made of: our own, our host's, our peers'.

Reads over the network go with the ticket of the control plane that asked for the file.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import cast

import grpc.aio

from paramd.errors import (
    ConflictError,
    DataLossError,
    DeniedError,
    ExhaustedError,
    UnreachableError,
    UsageError,
)
from paramd.layout.exports.plan import ExportPlan
from paramd.mesh.asked import Asked, check_way
from paramd.mesh.peers.control import PeerAddress
from paramd.mesh.peers.grpc import Channels, error_of
from paramd.mesh.reading.same_host import SharedSnapshot, is_same_host
from paramd.v1 import export_pb2
from paramd.v1 import sidecar_pb2 as pb
from paramd.wire import Chunk
from paramd_service.formats.filling import Memory
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.auth import CALLER_TICKET

SEGMENT_BYTES = 32 << 20
"""Asked of a peer at once; what follows is usually wanted next."""

_SKIP_BYTES = 1 << 20
_READ_S = 60.0
_TRIES = 4
_PAUSE_S = 0.2
_SMALL_BYTES = 64 << 10


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies, and lets the interpreter go on meanwhile when it takes long."""
    if len(target) < _SMALL_BYTES:
        target[:] = source
        return
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class OwnMemory:
    """A snapshot of this sidecar; its holder sees to it that it stays."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        copy_bytes(target, self.view(offset_bytes, len(target)))

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        return self._memory[offset_bytes : offset_bytes + size_bytes]


class HostMemory:
    """A snapshot of a peer on this host, by its descriptor."""

    def __init__(self, shared: SharedSnapshot) -> None:
        self._shared = shared

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        self._shared.read_into(address, offset_bytes, len(target))

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview | None:
        return None

    def close(self) -> None:
        self._shared.close()


class PeerMemory:
    """A snapshot of a peer elsewhere, over a stream that is read on as long as it fits."""

    def __init__(
        self,
        channels: Channels,
        asked: Asked,
        snapshot_id: str,
        size_bytes: int,
        state: tuple[int, int],
    ) -> None:
        """`state` is the (epoch, step) that the bytes must be of."""
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
        """Where the stream ends."""
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
            ParamdError: the peer is gone, its lease ended, or what it sends is wrong.
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
        """Ends the stream."""
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
            raise DataLossError(f"{self._who}: its stream ended too early") from None
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._who) from error
        if chunk.header is not None:
            if (chunk.header.epoch, chunk.header.step) != self._state:
                raise ConflictError(f"{self._who} sent another step than was pinned")
            return
        chunk.check()
        if chunk.offset_bytes != self._at + len(self._rest):
            raise DataLossError(f"{self._who} sent bytes that were not asked for")
        self._at = chunk.offset_bytes
        self._rest = chunk.data

    async def _drop(self) -> None:
        stream, self._stream = self._stream, None
        self._rest = memoryview(b"")
        if stream is not None:
            await stream.aclose()


class Memories:
    """All snapshots of one plan, opened together and let go of together."""

    def __init__(self, rank: RankSidecar, plan: ExportPlan, message: export_pb2.ExportPlan) -> None:
        """No I/O."""
        self._rank = rank
        self._plan = plan
        self._message = message
        self._channels = Channels(CALLER_TICKET.get)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> dict[tuple[int, str], Memory]:
        """By rank and state key.

        Raises:
            UsageError: a snapshot of the plan was not named.
            NotFoundError: the lease of one of ours, or of our host's, has ended.
        """
        self._stack.push_async_callback(self._channels.close)
        pins = {(pin.rank, pin.state_key): pin.snapshot_id for pin in self._message.pins}
        found: dict[tuple[int, str], Memory] = {}
        try:
            for key, source in self._plan.sources.items():
                for rank, spans in source.spans.items():
                    if (rank, key) not in pins:
                        raise UsageError(f"pins: none of rank {rank} for {key or 'parameters'!r}")
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
            raise UsageError(f"pins: rank {number} is not of this mesh")
        peer = PeerAddress(number, info.address, info.socket_path, info.host_id)
        if is_same_host(peer):
            ticket = CALLER_TICKET.get()
            try:
                shared = await asyncio.to_thread(SharedSnapshot.open, peer, ticket, snapshot_id)
            except (UnreachableError, DeniedError):
                pass  # another container perhaps: over the network then
            else:
                self._stack.callback(shared.close)
                return HostMemory(shared)
        check_way(number, info.address, info.host_id)
        asked = Asked(
            job=self._rank.config.job, epoch=self._rank.epoch, rank=number, address=info.address
        )
        memory = PeerMemory(
            self._channels,
            asked,
            snapshot_id,
            size_bytes,
            (self._message.epoch, self._message.step),
        )
        self._stack.push_async_callback(memory.close)
        return memory

    def _own(self, snapshot_id: str, size_bytes: int) -> OwnMemory:
        store = self._rank.pins.store
        snapshot = store.filled(snapshot_id)
        if snapshot.size_bytes != size_bytes or snapshot.step != self._message.step:
            raise ConflictError(
                f"snapshot {snapshot_id[:8]} holds {snapshot.size_bytes:,} bytes of step "
                f"{snapshot.step}; planned were {size_bytes:,} of step {self._message.step}"
            )
        store.hold(snapshot)
        self._stack.callback(store.drop, snapshot)
        return OwnMemory(snapshot.view())
