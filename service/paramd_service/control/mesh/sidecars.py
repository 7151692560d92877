"""Calls from the control plane to the sidecars of one incarnation, and its layout, cached.

OwnDirectory and OwnFinder give the control plane the client library's reads without REST.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from paramd import clock
from paramd.errors import (
    READS_KEY,
    DeadlineError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    asked_by,
)
from paramd.layout.codec import LayoutBound, decode_layout
from paramd.layout.merge import layout_digest
from paramd.layout.select import NameIndex
from paramd.mesh.peers.grpc import (
    CHANNEL_OPTIONS,
    READS,
    Asked,
    Channels,
    RankUnreachableError,
    call_timeout_s,
    told_errors,
    watched,
)
from paramd.security.tickets import ORDER_BITS, Role, Told, handed
from paramd.security.tls import is_of_job
from paramd.v1 import layout_pb2, sidecar_pb2
from paramd_service.control.base.config import Bootstrap
from paramd_service.control.mesh.coordinator import BoundaryRequest, RankAnswer, worst
from paramd_service.control.mesh.registry import MeshView, Registry

if TYPE_CHECKING:
    from paramd.mesh.peers.control import JobDocument
    from paramd.mesh.peers.discovery import KnownLayout, SidecarFinder

TICKET_TTL_S = 600.0
ORDER_TTL_S = 60.0
"""Least lifetime of an order, which is else that of its call; how wrong a host's clock may be is
the rank's to know (`CLOCK_SKEW_S`)."""
TRIES = 3
"""Of a call that only reads: another order each time, as a rank takes none twice."""
SIGNED_AT_ONCE = 32
"""Orders between two turns of the event loop; one takes 70 us."""
LAYOUT_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 3.0
ASK_S = 5.0
"""Timeout of short calls."""

Result = TypeVar("Result")


class OwnDirectory:
    """A client `Directory` of one incarnation for our own reads: statistics, samples, export pins.
    Its ticket has the role reader and no token; each call names its caller instead."""

    url = "this control plane"

    def __init__(
        self, bootstrap: Bootstrap, registry: Registry, control_address: Callable[[], str]
    ) -> None:
        """No I/O. `control_address` returns our own gRPC target once it is known."""
        self._mine = bootstrap
        self._registry = registry
        self._control_address = control_address

    def look_again(self) -> None:
        """No-op: our own address does not move."""

    async def jobs(self) -> list[str]:
        """The one job."""
        return [self._mine.job]

    async def job(self, job: str) -> JobDocument:
        """The job's document, with a fresh ticket.

        Raises:
            NotFoundError: For any other job.
        """
        from paramd.mesh.peers.control import JobDocument

        mine = self._mine
        if job != mine.job:
            raise NotFoundError(f"job {job[:64]!r} is not served here; only {mine.job!r} is")
        now_s = clock.now_s()
        peers = list(self._registry.peers())
        of_job = any(is_of_job(peer.address) for peer in peers)
        ticket, seed = await asyncio.to_thread(
            mine.keyed_ticket, Role.READER, ttl_s=TICKET_TTL_S, now_s=now_s
        )
        return JobDocument(
            job=mine.job,
            incarnation=mine.incarnation,
            world_size=mine.world_size,
            control_address=self._control_address(),
            layout_digest=self._registry.view().layout_digest,
            peers={peer.rank: peer for peer in peers},
            ticket=ticket,
            ticket_seed=seed,
            ticket_expires_s=now_s + TICKET_TTL_S,
            tls=mine.certificates.own() if of_job else None,
        )

    async def close(self) -> None:
        """No-op: nothing is open."""


class OwnFinder:
    """Connections to the sidecars of one incarnation, opened on first use."""

    def __init__(self, directory: OwnDirectory, layout: KnownLayout) -> None:
        self._directory = directory
        self._layout = layout
        self._reach: SidecarFinder | None = None
        self._opening = asyncio.Lock()

    async def __call__(self) -> SidecarFinder:
        """Return the connections, opened if needed."""
        # The lock: two first callers must not each open a set, one of which would leak.
        async with self._opening:
            if self._reach is None:
                # Lazy import: it is most of what this process would load.
                from paramd.mesh.peers.discovery import SidecarFinder

                reach = SidecarFinder(self._directory, None, known=self._layout)
                await reach.start()
                self._reach = reach
            return self._reach

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        async with self._opening:
            if self._reach is not None:
                await self._reach.close()
                self._reach = None


class OwnChannels(Channels):
    """Signs each call for its rank, once: what a sidecar is shown is good nowhere any more."""

    OPTIONS = (*CHANNEL_OPTIONS, ("grpc.enable_retries", 0))

    def __init__(self, bootstrap: Bootstrap, *, generation: int = 0, reads: bool = False) -> None:
        """With `reads`, a sidecar is also handed a gatherer's ticket, to read other ranks with."""
        super().__init__(str, job_tls=bootstrap.certificates.own)
        self._turn, self._turns = asyncio.Lock(), 0
        self._mine = bootstrap
        self._signer = bootstrap.signer
        self._generation = generation
        self._reads = reads
        self._gatherer = "", 0.0

    async def ask(self, asked: Asked, method: str, request: Any, *, timeout_s: float) -> Any:
        """As `Channels.ask`. Calls to all ranks at once leave others their turns."""
        async with self._turn:
            self._turns += 1
            if self._turns % SIGNED_AT_ONCE == 0:
                await asyncio.sleep(0)
        until_s = time.monotonic() + timeout_s
        for attempt in range(TRIES - 1 if method in READS else 0):
            try:
                left_s = until_s - time.monotonic()
                return await super().ask(asked, method, request, timeout_s=left_s)
            except UnreachableError:
                pause_s = 0.05 * 2**attempt
                if time.monotonic() + pause_s > until_s:
                    raise
                await asyncio.sleep(pause_s)
        left_s = max(until_s - time.monotonic(), 0.001)
        return await super().ask(asked, method, request, timeout_s=left_s)

    def open(self, asked: Asked, method: str, request: Any, *, timeout_s: float) -> Any:
        """As `Channels.open`; `request` may be a list of messages."""
        reads = self._handed() if self._reads else ""
        told = Told(f"/paramd.v1.SidecarService/{method}", asked_by.get(), reads)
        messages = request if isinstance(request, list) else [request]
        for message in messages:
            told.add(message.SerializeToString())
        order = self._signer.mint(
            job=self._mine.job,
            incarnation=self._mine.incarnation,
            role=Role.CONTROL,
            rank=asked.rank,
            ttl_s=max(ORDER_TTL_S, timeout_s),
            number=(self._generation << ORDER_BITS) + next(_orders),
            told=told.digest,
        )
        metadata = [("authorization", f"Bearer {order}"), *asked.metadata()]
        if reads:
            metadata.append((READS_KEY, reads))
        return self.method(asked.address, method)(
            iter(request) if isinstance(request, list) else request,
            timeout=call_timeout_s(timeout_s),
            metadata=metadata,
        )

    def _handed(self) -> str:
        """The gatherer's ticket and seed, renewed at half its lifetime."""
        mine, now_s = self._mine, clock.now_s()
        text, renew_s = self._gatherer
        if now_s >= renew_s:
            text = handed(
                *mine.keyed_ticket(Role.GATHERER, ttl_s=TICKET_TTL_S, now_s=now_s, use="gatherer")
            )
            self._gatherer = text, now_s + TICKET_TTL_S / 2
        return text


_orders = itertools.count(1)


class SidecarCalls:
    """Calls to the sidecars of one mesh over cached channels."""

    def __init__(self, bootstrap: Bootstrap, *, generation: int = 0, reads: bool = False) -> None:
        """No I/O. `generation`: this control plane's; sidecars obey the highest. `reads`: whether
        the sidecars read from others to answer."""
        self._bootstrap = bootstrap
        self._generation = generation
        self._channels = OwnChannels(bootstrap, generation=generation, reads=reads)

    async def ask(
        self, rank: int, address: str, request: Any, *, timeout_s: float = ASK_S, method: str = ""
    ) -> Any:
        """Call one rank's sidecar; an answer from any other rank or incarnation is refused.

        `request`: a message, whose incarnation and generation are set here, or a list of them.
        `method`: by default the one that the message is named after.

        Raises:
            ParamdError: Of the class that the status stands for, naming the rank.
        """
        asked = self._bootstrap.asked(rank, address)
        if isinstance(request, Message):
            ours = {"incarnation": self._bootstrap.incarnation, "generation": self._generation}
            for name in ours.keys() & request.DESCRIPTOR.fields_by_name.keys():
                setattr(request, name, ours[name])
        method = method or _method_of(request)
        return await self._channels.ask(asked, method, request, timeout_s=timeout_s)

    async def ask_long(
        self, rank: int, address: str, request: Any, *, timeout_s: float, method: str = ""
    ) -> Any:
        """As `ask`, for a call that may take long: raises RankUnreachableError within seconds if
        the sidecar is stopped."""
        call = self.ask(rank, address, request, timeout_s=timeout_s, method=method)
        try:
            return await watched(call, lambda: self._probe(rank, address))
        except RankUnreachableError:
            raise
        except (UnreachableError, DeadlineError):
            await self._probe(rank, address)
            raise

    @asynccontextmanager
    async def stream(
        self,
        rank: int,
        address: str,
        request: Message,
        *,
        timeout_s: float,
        sources: Sequence[tuple[int, str]] = (),
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """Messages of a streaming call, which ends with the block. While it is quiet, the rank and
        the `sources` it reads from are probed. Raises as `ask_long`."""

        async def probe() -> None:
            probes = [self._probe(*one) for one in {(rank, address), *sources}]
            for found in await asyncio.gather(*probes, return_exceptions=True):
                if isinstance(found, BaseException):
                    raise found

        asked = self._bootstrap.asked(rank, address)
        call = self._channels.open(asked, _method_of(request), request, timeout_s=timeout_s)
        async with aclosing(_messages(call, asked, probe)) as messages:
            try:
                yield messages
            finally:
                call.cancel()

    async def reach(
        self,
        rank: int,
        address: str,
        request: BoundaryRequest,
        snapshot_ids: Sequence[str],
        timeout_s: float,
    ) -> RankAnswer:
        """Call ReachBoundary; a stopped sidecar is detected within seconds. Raises as `ask`."""
        message = sidecar_pb2.ReachBoundaryRequest(
            boundary=request.number,
            snapshot_ids=snapshot_ids,
            action=sidecar_pb2.BoundaryAction.ValueType(request.action),
            token=request.token,
            edit_id=request.edit_id,
            step_count=request.step_count,
            lease_ms=request.lease_ms,
        )
        call = self.ask(rank, address, message, timeout_s=timeout_s)
        # A deadline alone cannot tell a long update from a stopped sidecar.
        answer = await watched(call, lambda: self._probe(rank, address))
        header = answer.header
        found = (header.incarnation, header.step, answer.captured, answer.reason)
        return RankAnswer(rank, *found, header.edits, header.history, header.boundary_token)

    async def _probe(self, rank: int, address: str) -> None:
        request = sidecar_pb2.GetStateRequest()
        try:
            await self.ask(rank, address, request, timeout_s=PROBE_TIMEOUT_S)
        except (DeadlineError, UnreachableError) as error:
            raise RankUnreachableError(
                rank,
                f"rank {rank} does not answer: its sidecar is stopped, dead or disconnected; "
                "try again in a few seconds (this does not stop the training, if it still runs)",
            ) from error
        except ParamdError:
            pass  # any answer, even an error, proves the sidecar alive

    async def layout(self, rank: int, address: str) -> layout_pb2.Layout:
        """All batches of GetLayout as one message. Raises as `ask`."""
        whole, request = layout_pb2.Layout(), sidecar_pb2.GetLayoutRequest()
        bound = LayoutBound(f"rank {rank} ({address})")
        async with self.stream(rank, address, request, timeout_s=LAYOUT_TIMEOUT_S) as batches:
            async for batch in batches:
                bound.count(batch.layout)
                whole.MergeFrom(batch.layout)
        return whole

    async def is_back(self, address: str) -> None:
        """Reconnect to `address` at the next call without delay: its sidecar is about to join."""
        await self._channels.is_back(address)

    async def keep_only(self, view: MeshView) -> None:
        """Close channels to replaced sidecars."""
        await self._channels.keep_only(frozenset(report.peer.address for report in view.joined))

    async def close(self) -> None:
        await self._channels.close()


def _method_of(request: Message) -> str:
    return str(request.DESCRIPTOR.name).removesuffix("Request")


async def _messages(
    call: Any, asked: Asked, probe: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Any, None]:
    first = True
    try:
        with told_errors(asked.who):
            while (message := await watched(call.read(), probe)) is not grpc.aio.EOF:
                if first or message.HasField("header"):
                    asked.check(message.header)
                first = False
                yield message
            if await call.code() is not grpc.StatusCode.OK:
                await call
    except RankUnreachableError:
        raise
    except (UnreachableError, DeadlineError):
        await probe()
        raise


def address_of(view: MeshView, rank: int) -> str:
    """Address of a rank's sidecar.

    Raises:
        UnreachableError: When it is not connected.
    """
    found = view.ranks[rank]
    if found.report is None or not found.connected:
        raise UnreachableError(f"rank {rank}: {found.reason}")
    return found.report.address


async def on_all(
    view: MeshView, call: Callable[[int, str], Awaitable[Result]]
) -> dict[int, Result]:
    """Call all joined ranks concurrently; return the answers by rank, or raise the worst error."""
    ranks = [(report.rank, report.address) for report in view.joined]
    found = await asyncio.gather(
        *(call(rank, address) for rank, address in ranks), return_exceptions=True
    )
    answers: dict[int, Result] = {}
    failures: dict[int, ParamdError] = {}
    for (rank, _), one in zip(ranks, found, strict=True):
        if isinstance(one, ParamdError):
            failures[rank] = one
        elif isinstance(one, BaseException):
            raise one
        else:
            answers[rank] = one
    if failures:
        raise worst(failures)
    return answers


class LayoutSource:
    """The current layout, fetched from any joined sidecar and cached by digest."""

    def __init__(self, calls: SidecarCalls) -> None:
        self._calls = calls
        self._kept: tuple[str, NameIndex] | None = None
        self._lock = asyncio.Lock()
        # Decoding and hashing 100,000 tensors takes a second: keep it off the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paramd-layout")

    async def get(self, view: MeshView) -> tuple[str, NameIndex]:
        """Digest and name index of the layout; `NameIndex.layout` is the layout itself.

        Raises:
            UnreachableError: If the ranks report none or different ones, or none answers.
        """
        wanted = view.layout_digest
        if not wanted:
            raise UnreachableError(
                f"no layout is known: {view.reason or 'no rank has reported one'}; "
                "try again in a few seconds"
            )
        # One fetch at a time: concurrent callers wait and share its result.
        async with self._lock:
            if self._kept is None or self._kept[0] != wanted:
                self._kept = (wanted, await self._fetch(view, wanted))
            return self._kept

    async def _fetch(self, view: MeshView, wanted: str) -> NameIndex:
        reasons: list[str] = []
        for report in view.joined[:4]:
            try:
                message = await self._calls.layout(report.rank, report.address)
                loop = asyncio.get_running_loop()
                index, digest = await loop.run_in_executor(self._thread, _decode, message)
            except ParamdError as error:
                reasons.append(str(error))
                continue
            if digest == wanted:
                return index
            reasons.append(f"rank {report.rank} sent a layout with a different digest")
        raise UnreachableError(f"the layout could not be fetched: {'; '.join(reasons)}")

    def close(self) -> None:
        """Shut down the decoding thread."""
        self._thread.shutdown()


def _decode(message: layout_pb2.Layout) -> tuple[NameIndex, str]:
    layout = decode_layout(message)
    return NameIndex(layout), layout_digest(layout)
