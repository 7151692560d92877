"""Copies parameters into tensors: on this host from shared memory, else over streams.

The sidecar sends a descriptor of a snapshot's memory over its Unix socket. It reuses that
memory only after our `unmap`; if the connection ends without one, it abandons the memory, which
the kernel keeps for us. So mapped values never change, even after the lease.

Copies use pread, as fast as memcpy; mapping first would double the cost with page faults.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import mmap
import os
import socket
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, get_args

from paramd.errors import (
    ConflictError,
    DeniedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
)
from paramd.layout.plan import RankRead, ReadPlan
from paramd.layout.replicas import Sample, differing, ranges_in, sample_spans
from paramd.layout.types import Box, TensorLayout, joined
from paramd.memory import handover
from paramd.mesh.peers.bulk import CONNECT_S
from paramd.mesh.peers.control import JobDocument, PeerAddress
from paramd.mesh.peers.grpc import LeaseEndedError, all_ended, ended, is_relayed
from paramd.mesh.peers.sidecars import FastPathBackoff, RankPin, Sidecars
from paramd.mesh.reading.live import LiveRank, read_live
from paramd.mesh.reading.ops import ANSWER_S, asked, is_same_host
from paramd.mesh.reading.places import Place, PlaceSink, RandomAccess, fill_from
from paramd.mesh.reading.stream import Landed, Reading, Transport, check_boundary, read_range
from paramd.security.tls import host_of, is_loopback
from paramd.state import StateName
from paramd.v1 import sidecar_pb2

if TYPE_CHECKING:
    import torch

    from paramd.mesh.reading.assemble import SnapshotView, Targets

REACH_S: Final = 8.0
"""Time limit, in seconds, for a sidecar to try the other hosts: 3 s without an answer."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The transport of one rank's bytes to this process."""

    rank: int
    transport: Transport
    """"same-host", "stream" or "grpc"; "auto" if there is no way."""
    reason: str = ""
    """Why no faster one."""


async def find_lanes(sidecars: Sidecars) -> list[Lane]:
    """The lane of each rank, tried now; waits at most a few seconds."""

    async def lane(rank: int) -> Lane:
        try:
            peer = sidecars.document.peer(rank)
            state = (await sidecars.state(rank, CONNECT_S)).state
        except ParamdError as error:
            return Lane(rank, "auto", str(error))
        if is_same_host(peer):
            return Lane(rank, "same-host")
        if is_relayed(peer.address):
            way = "its host cannot be reached from here: through the control plane"
            return Lane(rank, "grpc", way)
        host = host_of(peer.address)
        if not state.stream_port:
            return Lane(rank, "grpc", "its sidecar has no port for streams; its log says why")
        try:
            opening = asyncio.open_connection(host, state.stream_port)
            _, writer = await asyncio.wait_for(opening, CONNECT_S)
            writer.close()
        except OSError as error:
            why = str(error) or f"no answer in {CONNECT_S:.0f} s"
            return Lane(
                rank,
                "grpc",
                f"port {state.stream_port} of {host}, for streams, cannot be reached ({why})",
            )
        return Lane(rank, "stream")

    return list(await asyncio.gather(*map(lane, sorted(sidecars.document.peers))))


@dataclass(frozen=True, slots=True)
class Reach:
    """The ranks that the host of one rank reaches: by a sidecar, or through the control plane."""

    rank: int
    """The first of its host, whose sidecar tried."""
    to: int
    """The first rank of the other host; -1 for the control plane."""
    address: str
    """The dialled address."""
    reason: str
    """Why there was no answer; empty when there was one."""
    took_s: float


async def find_reaches(sidecars: Sidecars) -> list[Reach]:
    """The peers that each host of the job reaches, tried now by one sidecar of each."""

    async def tried(rank: int) -> list[Reach]:
        try:
            request = sidecar_pb2.ReachPeersRequest()
            found = await sidecars.ask(rank, request, sidecar_pb2.ReachPeersResponse, REACH_S)
        except ParamdError:
            return []  # its state says why
        return [
            Reach(rank, one.rank, one.address, one.reason, one.took_ns / 1e9) for one in found.peers
        ]

    peers = sidecars.document.peers
    first = {peers[rank].host_id: rank for rank in sorted(peers, reverse=True)}
    found = await asyncio.gather(*map(tried, sorted(first.values())))
    return [one for of in found for one in of]


class SharedSnapshot:
    """The memory of one pinned snapshot. Made by `open`; call `close`."""

    def __init__(
        self,
        connection: socket.socket,
        descriptor: int,
        size_bytes: int,
        snapshot_id: str,
        state: StateName,
        boundary_token: int,
    ) -> None:
        self.state = state
        """State of the bytes, as their sidecar says."""
        self.boundary_token = boundary_token
        """As in `RankPin`."""
        self._connection = connection
        self._descriptor = descriptor
        self._snapshot_id = snapshot_id
        self._maps: list[weakref.ref[mmap.mmap]] = []
        self.size_bytes = size_bytes

    @classmethod
    def open(cls, peer: PeerAddress, ticket: str, snapshot_id: str) -> SharedSnapshot:
        """Get the memory from the sidecar. Blocks, for a few seconds at most.

        Raises:
            UnreachableError: If the right sidecar does not respond at the socket.
            DeniedError: If it refused the ticket.
            NotFoundError: If the lease ended.
        """
        connection = handover.connect(Path(peer.socket_path), timeout_s=ANSWER_S)
        try:
            message = {"op": "map", "ticket": ticket, "rank": peer.rank, "snapshot_id": snapshot_id}
            answer, (descriptor,) = asked(connection, message, "mapped", 1)
            try:
                incarnation, history, step, edits = map(int, answer["state"][:4])
                label = str(answer["state"][4])
                state = StateName(incarnation, history, step, edits, label)
                token = int(answer["boundary_token"])
                size_bytes = int(answer["size_bytes"])
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                os.close(descriptor)
                raise UnreachableError(f"rank {peer.rank}: its answer names no state") from error
            return cls(connection, descriptor, size_bytes, snapshot_id, state, token)
        except BaseException:
            connection.close()
            raise

    def read_into(self, address: int, offset_bytes: int, size_bytes: int) -> None:
        """Copy bytes [offset_bytes, offset_bytes + size_bytes) to `address`.

        Thread-safe; releases the GIL.

        Raises:
            UnreachableError: If the memory is shorter than announced.
        """
        target = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        done = 0
        while done < size_bytes:
            moved = os.preadv(self._descriptor, [target[done:]], offset_bytes + done)
            if moved == 0:
                raise UnreachableError("the snapshot's memory is shorter than its sidecar says")
            done += moved

    def map_private(self) -> mmap.mmap | None:
        """A private, writable mapping of the memory; None if it is empty.

        Writes are copy-on-write. Tensors on the mapping keep it alive, even after `close`.
        """
        if not self.size_bytes:
            return None
        if os.fstat(self._descriptor).st_size < self.size_bytes:
            # Touching pages beyond the end would raise SIGBUS.
            raise UnreachableError("the snapshot's memory is shorter than its sidecar says")
        memory = mmap.mmap(
            self._descriptor,
            self.size_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        self._maps.append(weakref.ref(memory))
        return memory

    def close(self) -> None:
        """Release the memory. Idempotent.

        The sidecar may reuse it only if no mapping is left here; otherwise it is abandoned, and
        lives as long as the last mapping.
        """
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        try:
            if all(memory() is None for memory in self._maps):
                handover.send(self._connection, {"op": "unmap", "snapshot_id": self._snapshot_id})
        except OSError:
            pass  # the sidecar is gone and will not reuse the memory
        finally:
            self._connection.close()


def open_live(
    peer: PeerAddress, document: JobDocument, spans: Sequence[tuple[int, int]]
) -> LiveRank:
    """A rank's page and arena from its sidecar; blocks for seconds. ParamdError: refused."""
    message = {
        "op": "live",
        "ticket": document.shown(peer.rank),
        "rank": peer.rank,
        "incarnation": document.incarnation,
        "layout_digest": document.layout_digest,
    }
    with handover.connect(Path(peer.socket_path), timeout_s=ANSWER_S) as connection:
        answer, (page, arena) = asked(connection, message, "live", 2)
    return LiveRank(peer.rank, page, arena, int(answer["arena_bytes"]), spans)


MAX_COPY_THREADS: Final = 4
"""Threads that copy from shared memory; two saturate a small machine's memory bandwidth."""

MAX_GAP_BYTES: Final = 1 << 18
"""Gaps up to this size are read along: another call would take as long."""

STREAMS: Final = 4
"""Streams per rank from another host: one rarely fills its link."""

STREAM_LEAST_BYTES: Final = 32 << 20

# For work that blocks on the copy threads, and for opening sockets.
_OTHER_THREADS: Final = 8

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tensors that patterns selected, and how to read them."""

    names: Sequence[tuple[str, ...]]
    """The matching names of each tensor of the plan."""
    plan: ReadPlan
    at_boundary: bool
    """Whether they can only be copied at an agreed boundary."""
    tensors: Sequence[TensorLayout] = ()
    """The whole tensors, to compare their replicas."""


def check_transport(transport: str) -> None:
    """Raise UsageError for an unknown transport."""
    if transport not in get_args(Transport):
        raise UsageError(
            f"transport: {transport!r}; expected one of {', '.join(get_args(Transport))}"
        )


class Landings(Protocol):
    """Destinations of a plan's bytes; `assemble.Targets`, for one."""

    def places(self, read: RankRead) -> list[Place]:
        """Destinations of one rank's snapshot, sorted by `begin`."""


class Transfer:
    """Copies snapshots into tensors, on threads started on first use and joined by `close`."""

    def __init__(self) -> None:
        self._copy_threads = max(1, min(len(os.sched_getaffinity(0)), MAX_COPY_THREADS))
        self._copiers = ThreadPoolExecutor(self._copy_threads, "paramd-copy")
        self._blocking = ThreadPoolExecutor(_OTHER_THREADS, "paramd-blocking")
        self._live_backoff = FastPathBackoff()

    def close(self) -> None:
        """Join the threads; blocks while a copy runs."""
        self._blocking.shutdown()
        self._copiers.shutdown()

    async def load_torch(self) -> None:
        """Import torch off the event loop, since that takes seconds; UsageError without torch."""
        if "paramd.mesh.reading.assemble" in sys.modules:
            return
        try:
            await self.run(lambda: import_module("paramd.mesh.reading.assemble"))
        except ImportError as error:
            raise UsageError(
                f"tensors need torch, which cannot be imported here ({error}); "
                "run: pip install 'paramd[torch]'"
            ) from error

    async def dtype(self, given: torch.dtype | str | None) -> torch.dtype | None:
        """A dtype, given by its name, too. Raises UsageError."""
        if not isinstance(given, str):
            return given
        await self.load_torch()
        from paramd.mesh.reading.assemble import dtype_of

        return dtype_of(given)

    def targets(
        self,
        chosen: Chosen,
        *,
        dtype: torch.dtype | str | None,
        device: torch.device | str | None,
        into: Mapping[str, torch.Tensor] | None,
    ) -> Targets:
        """Destination tensors. Args, Raises: as `Targets`."""
        import torch

        from paramd.mesh.reading.assemble import Targets, dtype_of

        cast = dtype_of(dtype) if dtype is not None else None
        try:
            where = torch.device(device) if device is not None else None
            if where is not None:
                torch.empty(0, device=where)
        except (AssertionError, RuntimeError) as error:
            raise UsageError(f"device: {device!r} cannot be used here: {error}") from error
        return Targets(chosen.plan, chosen.names, dtype=cast, device=where, into=into)

    async def read(self, reading: Reading, plan: ReadPlan, targets: Targets) -> None:
        """Fill the targets from all ranks concurrently; no copy is left running at the end."""

        async def stream(read: RankRead) -> None:
            peer = reading.sidecars.document.peer(read.rank)
            count = 1 if is_loopback(host_of(peer.address)) else STREAMS
            parts = _cut(targets.places(read), read.size_bytes, count)
            await all_ended(
                [
                    read_range(reading, read.rank, PlaceSink(places, reading.landed), begin, end)
                    for begin, end, places in parts
                ]
            )

        await self._fill(reading, plan, targets, stream)

    async def read_live(
        self,
        sidecars: Sidecars,
        chosen: Chosen,
        targets: Targets,
        transport: Transport,
        samples: Sequence[Sample],
        leave_out: Callable[[int], None],
        landed: Landed,
        deadline_s: float,
    ) -> tuple[StateName, tuple[str, ...] | None] | None:
        """Fill the targets straight from the arenas, if all needed ranks are on this host; the
        state, and the tensors that differ there (None: not all ranks of `samples` had it still).

        `leave_out` is told the ranks of `samples` alone that do not respond. Returns None if it
        cannot be done, or training was too quick: read snapshots instead.

        Raises:
            DeadlineError: The copy was not done at `deadline_s` on the monotonic clock.
        """
        reads = chosen.plan.ranks
        document = sidecars.document
        if transport not in ("auto", "same-host") or chosen.at_boundary or not reads:
            return None
        peers = [document.peer(read.rank) for read in reads]
        if not all(map(is_same_host, peers)) or not self._live_backoff.tries(time.monotonic()):
            return None
        with ExitStack() as stack:
            ranks: dict[int, LiveRank] = {}
            for read in reads:
                opened = await self._open_live(sidecars, read.rank, read.spans, stack)
                if opened is None:
                    return None
                ranks[read.rank] = opened
            compared = await self._open_samples(sidecars, ranks, samples, stack, leave_out)
            jobs = [(ranks[read.rank], targets.places(read)) for read in reads]

            def copy() -> None:
                landed.begin(chosen.plan.size_bytes)
                fill_from(jobs, self._copiers, self._copy_threads, landed, deadline_s)

            def read_all() -> tuple[StateName, tuple[str, ...] | None] | None:
                state = read_live(ranks, document.incarnation, copy)
                return (state, _differing(samples, compared, state)) if state is not None else None

            found = await self.run(read_all)
        if found is not None:
            self._live_backoff.agreed()
        else:
            # Ranks that run free, or steps too short for the copy: the next read would wait too.
            self._live_backoff.differed(time.monotonic())
        return found

    async def _open_live(
        self, sidecars: Sidecars, rank: int, spans: Sequence[tuple[int, int]], stack: ExitStack
    ) -> LiveRank | None:
        """A rank's page and arena, which `stack` closes; None if they cannot be had. Raises
        RankUnreachableError if its sidecar does not respond at all."""
        document = sidecars.document
        opening = partial(open_live, document.peer(rank), document, spans)
        try:
            return stack.enter_context(closing(await self.run(opening, LiveRank.close)))
        except UnreachableError:
            await sidecars.probe(rank)
        except ParamdError:
            pass  # pins tell why, and serve what a torn rank still has
        return None

    async def _open_samples(
        self,
        sidecars: Sidecars,
        ranks: Mapping[int, LiveRank],
        samples: Sequence[Sample],
        stack: ExitStack,
        leave_out: Callable[[int], None],
    ) -> dict[int, LiveRank] | None:
        """The ranks of samples, which `stack` closes; None if they cannot all be read here."""
        others = {rank for one in samples for rank in one.begins} - ranks.keys()
        if not all(is_same_host(sidecars.document.peers[rank]) for rank in others):
            return None

        async def opened(rank: int) -> LiveRank | None:
            try:
                return await self._open_live(sidecars, rank, (), stack)
            except ParamdError:
                leave_out(rank)
                return None

        found = {one.rank: one for one in await all_ended(map(opened, others)) if one is not None}
        return {**ranks, **found} if len(found) == len(others) else None

    async def read_parts(self, reading: Reading, plan: ReadPlan, targets: Landings) -> None:
        """As `read`, but transfer only the bytes of each snapshot that `plan` lands."""

        async def stream(read: RankRead) -> None:
            sink = PlaceSink(targets.places(read), reading.landed)
            landings = ((one.begin_bytes, one.end_bytes) for one in read.landings)
            for begin, end in joined(landings, MAX_GAP_BYTES):
                await read_range(reading, read.rank, sink, begin, end)

        await self._fill(reading, plan, targets, stream)

    async def tensors(
        self,
        reading: Reading,
        chosen: Chosen,
        numbers: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors with these indexes in the plan, by name; tied names share one object."""
        if not numbers:
            return {}
        read = self.read
        if len(numbers) < len(chosen.plan.tensors):
            names = [chosen.names[number] for number in numbers]
            chosen = replace(chosen, plan=chosen.plan.only(numbers), names=names)
            read = self.read_parts
        targets = self.targets(chosen, dtype=dtype, device=None, into=None)
        await read(reading, chosen.plan, targets)
        return targets.results()

    async def part(
        self,
        reading: Reading,
        chosen: Chosen,
        number: int,
        box: Box,
        *,
        dtype: torch.dtype | None = None,
    ) -> dict[str, torch.Tensor]:
        """A box of the tensor with that index in the plan, by the tensor's names."""
        names = [chosen.names[number]]
        part = replace(chosen, plan=chosen.plan.part(number, box), names=names)
        targets = self.targets(part, dtype=dtype, device=None, into=None)
        await self.read_parts(reading, part.plan, targets)
        return targets.results()

    async def land(
        self,
        jobs: Sequence[tuple[RandomAccess, Sequence[Place]]],
        landed: Callable[[int], object] = lambda size_bytes: None,
        deadline_s: float = math.inf,
    ) -> None:
        """Fill the places of snapshots that are here.

        Raises:
            DeadlineError: As `fill_from`.
        """
        await self.run(
            lambda: fill_from(jobs, self._copiers, self._copy_threads, landed, deadline_s)
        )

    async def _fill(
        self,
        reading: Reading,
        plan: ReadPlan,
        targets: Landings,
        stream: Callable[[RankRead], Awaitable[None]],
    ) -> None:
        """Copy from shared memory where possible, and with `stream` from the other ranks."""
        async with AsyncExitStack() as stack:
            shared = await self._share(reading, stack)
            works = [stream(read) for read in plan.ranks if read.rank not in shared]
            jobs = [
                (shared[read.rank], targets.places(read))
                for read in plan.ranks
                if read.rank in shared
            ]
            if jobs:
                works.append(self.land(jobs, reading.landed, reading.deadline_s))
            await all_ended(works)

    async def view(self, reading: Reading, chosen: Chosen, stack: AsyncExitStack) -> SnapshotView:
        """Shards in the sidecars' memory until `stack` exits; UnreachableError: another host."""
        from paramd.mesh.reading.assemble import SnapshotView

        shared = await self._share(replace(reading, transport="same-host"), stack)
        mapped = {rank: snapshot.map_private() for rank, snapshot in shared.items()}
        return SnapshotView(
            chosen.plan,
            chosen.names,
            {rank: memory for rank, memory in mapped.items() if memory is not None},
            job=reading.sidecars.document.job,
            incarnation=reading.pinned.state.incarnation,
            step=reading.pinned.state.step,
            unsettled=reading.pinned.unsettled,
        )

    async def _share(self, reading: Reading, stack: AsyncExitStack) -> dict[int, SharedSnapshot]:
        """Open the snapshots whose memory this process can share, by rank."""
        if reading.transport in ("stream", "grpc"):
            return {}
        pins = [pin for pin in reading.pinned.pins.values() if pin.size_bytes]
        found = await all_ended([self._open(reading, pin, stack) for pin in pins])
        return {pin.rank: one for pin, one in zip(pins, found, strict=True) if one is not None}

    async def _open(
        self, reading: Reading, pin: RankPin, stack: AsyncExitStack
    ) -> SharedSnapshot | None:
        document, auto = reading.sidecars.document, reading.transport == "auto"
        peer = document.peer(pin.rank)
        if not is_same_host(peer):
            if auto:
                return None
            raise UnreachableError(
                f"rank {pin.rank} runs on another host, or its socket is not visible here "
                '(another container or user); use transport="auto"'
            )
        try:
            shared = await self.run(
                lambda: SharedSnapshot.open(peer, document.shown(pin.rank), pin.snapshot_id),
                SharedSnapshot.close,
            )
        except NotFoundError as error:
            raise LeaseEndedError(str(error)) from error
        except (UnreachableError, DeniedError):
            if not auto:
                raise
            await reading.sidecars.probe(pin.rank)
            return None  # another user's socket, say; the sidecar itself responds
        stack.callback(shared.close)
        pinned, who = reading.pinned, reading.sidecars.who(pin.rank)
        check_boundary(shared.boundary_token, pinned.boundary_token, who)
        if shared.state != pinned.state:
            raise ConflictError(f"{who} has {shared.state}; the pin is of {pinned.state}")
        return shared

    async def run(
        self, work: Callable[[], Result], let_go: Callable[[Result], object] | None = None
    ) -> Result:
        """Run blocking work on a thread. Even if cancelled, returns only after it has ended.

        Otherwise the thread could write into memory that the caller has freed. `let_go` closes the
        result if the caller was cancelled meanwhile.
        """
        running = asyncio.get_running_loop().run_in_executor(self._blocking, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError):
                await ended({running})
            if not running.cancelled() and isinstance(error := running.exception(), ParamdError):
                raise asyncio.CancelledError from error
            if let_go is not None and not running.cancelled() and running.exception() is None:
                let_go(running.result())
            raise


def _differing(
    samples: Sequence[Sample], ranks: Mapping[int, LiveRank] | None, state: StateName
) -> tuple[str, ...] | None:
    """As `differing`, of samples read now; None if a rank no longer shows that state."""
    if ranks is None:
        return None
    seen: dict[int, list[bytes]] = {}
    for rank, spans in sample_spans(samples).items():
        data = ranks[rank].bytes_of(state, spans)
        if data is None:
            return None
        seen[rank] = [data[begin:end] for begin, end in ranges_in(samples, rank, spans)]
    return differing(samples, seen)


def _cut(
    places: Sequence[Place], size_bytes: int, count: int
) -> list[tuple[int, int, Sequence[Place]]]:
    """Parts of a snapshot for at most `count` streams: begin, end, and the places in between.

    Cut only where no place has bytes on both sides.
    """
    found: list[tuple[int, int, Sequence[Place]]] = []
    least = max(-(-size_bytes // count), STREAM_LEAST_BYTES)
    begin = first = reached = 0
    for number, place in enumerate(places):
        if reached <= place.begin and place.begin - begin >= least:
            found.append((begin, place.begin, places[first:number]))
            begin, first = place.begin, number
        reached = max(reached, place.end)
    return [*found, (begin, size_bytes, places[first:])]
