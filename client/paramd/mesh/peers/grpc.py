"""gRPC calls to sidecars and the control plane: channels, tickets, deadlines, errors.

An address does not identify a sidecar: ports are reused, and loopback is local to each host. So
every call names its rank, a sidecar refuses calls meant for another one, and the header of every
response is checked against the request.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import grpc
import grpc.aio

from paramd import errors
from paramd.errors import (
    ConflictError,
    DeniedError,
    NotFoundError,
    ParamdError,
    UnreachableError,
    UsageError,
    error_of_grpc,
)
from paramd.memory.handover import Message
from paramd.security import loopback
from paramd.security.tickets import claimed
from paramd.security.tls import (
    ClientTls,
    Pems,
    host_of,
    is_loopback,
    is_secure,
    open_channel,
    tls_for,
)
from paramd.state_files import host_id, same_network
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc, sidecar_pb2, sidecar_pb2_grpc
from paramd.wire import Chunk, parse_chunk

if TYPE_CHECKING:
    from paramd.mesh.peers.relay import TunnelRelay

RELAY = "relay/"
"""Prefix of a sidecar's address that is only reached through the control plane."""


def is_relayed(address: str) -> bool:
    """Whether an address leads through the control plane; see relay.py."""
    return address.startswith(RELAY)


class RankUnreachableError(UnreachableError):
    """The sidecar of one rank does not respond."""

    def __init__(self, rank: int, text: str, *, stopped: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        self.stopped = stopped
        """A probe timed out as well; an immediate retry would only time out again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Target of a call: one rank's sidecar in one incarnation, and its supposed address."""

    job: str
    incarnation: int
    rank: int
    address: str
    layout_digest: str = ""
    """Empty when the caller does not rely on a layout."""

    @property
    def who(self) -> str:
        """For error messages."""
        return f"rank {self.rank} ({self.address})"

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call, without the ticket."""
        return ((errors.RANK_KEY, str(self.rank)), *errors.metadata())

    def check(self, header: common_pb2.Header | None) -> None:
        """Check that a response with this header came from this target.

        Raises:
            RankUnreachableError: If another rank or job responds at the address.
            ConflictError: If the rank is in another incarnation or has another layout.
        """
        if header is None or (header.job, header.rank) != (self.job, self.rank):
            answerer = f"rank {header.rank} of job {header.job!r}" if header else "another program"
            raise RankUnreachableError(
                self.rank,
                f"{self.who} of job {self.job!r} is not there: {answerer} responds at that address",
            )
        known = self.layout_digest and header.layout_digest
        if header.incarnation != self.incarnation or (
            known and header.layout_digest != self.layout_digest
        ):
            raise ConflictError(
                f"{self.who} is in run {header.incarnation} with layout "
                f"{header.layout_digest[:12]!r}; expected run {self.incarnation}, "
                f"{self.layout_digest[:12]!r}; try again in a moment"
            )


def no_way(rank: int, address: str, host: str, here: str) -> str:
    """Why `address` cannot be reached: it is another host's loopback. Empty if it is not.

    `host` and `here` are the `host_id` of the listening process (empty if unknown) and of this one.
    """
    if not host or not is_loopback(host_of(address)) or same_network(host, here):
        return ""
    return (
        f"rank {rank} listens on {address}, which is loopback on its own host and cannot be "
        "reached from this one; start it with PARAMD_SIDECAR_LISTEN=<its address>:0 and TLS "
        "(PARAMD_TLS_CERT, PARAMD_TLS_KEY), or connect from its host"
    )


def check_way(rank: int, address: str, host: str) -> None:
    """Raise RankUnreachableError if `no_way` gives a reason, or a stranger would answer."""
    if reason := no_way(rank, address, host, host_id()):
        raise RankUnreachableError(rank, reason)


def check_handover(answer: Message, ticket: str, rank: int) -> None:
    """Raise RankUnreachableError unless a Unix socket's response came from `rank`'s sidecar."""
    try:
        job, incarnation = claimed(ticket)
    except DeniedError:
        job, incarnation = "", 0
    found = (answer.get("job"), answer.get("incarnation"), answer.get("rank"))
    if found != (job, incarnation, rank):
        raise RankUnreachableError(
            rank,
            f"rank {rank} of job {job!r}, run {incarnation}, is not at its Unix socket: "
            f"rank {answer.get('rank')} of job {answer.get('job')!r}, run "
            f"{answer.get('incarnation')}, responds there",
        )


class Background:
    """Tasks that outlive the call that started them, such as releases; awaited at `close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work`; its exceptions are ignored."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Wait for all tasks; each has its own deadline."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


LIVENESS_S: Final = 5.0
"""A dead or stopped sidecar is detected within this time."""

MORE_TIME: Final = "allow more time (timeout=, --timeout; 60 s unless given)"
"""Advice for a boundary that did not come in time."""

TELL_S: Final = 5.0
"""Seconds between two log lines about a call that waits."""

PHASE_NAMES: Final[dict[int, str]] = {
    int(number): name.removeprefix("PHASE_").lower().replace("held", "paused")
    for name, number in common_pb2.Phase.items()
}
"""Phases as documents spell them, e.g. "forward_backward"."""


def boundary_age_s(state: common_pb2.RankState) -> float:
    """Seconds since the last boundary of a rank; infinity before its first."""
    return state.boundary_age_ns / 1e9 if state.boundary_age_ns >= 0 else math.inf


def slow_text(rank: int, phase: int, step: int, age_s: float) -> str:
    """Why others wait for a rank whose last boundary was `age_s` seconds ago."""
    since = f"for {age_s:.0f} s" if age_s < math.inf else "since it attached"
    doing = PHASE_NAMES.get(phase, "unspecified")
    return f"rank {rank} ({doing}, step {step}): no boundary {since}"


MAX_CALL_S: Final = 500.0
"""Longest deadline of one call: sidecars refuse more than 600 s. Longer waits call again."""

_PROBE_AFTER_S: Final = 1.5
_WAITS_TO_RETRY: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE

READS: Final = ("GetState", "GetMesh", "GetLayout", "RenewSnapshot", "ReleaseSnapshot")
# Only idempotent methods, and only on UNAVAILABLE: otherwise the server may have acted.
_SERVICE_CONFIG: Final = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": "paramd.v1.SidecarService", "method": m} for m in READS],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "0.5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)
CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a stopped peer is detected only after 44 to 59 s.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_frame_size", (16 << 20) - 1),
    # A fixed window: by default it grows to hundreds of MiB of unread chunks. This one fills
    # a link of 1 GB/s at 3 ms.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 3 << 20),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # A killed sidecar is back within seconds; the default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the limit of one attempt: with TLS four round trips, 1.6 s on a link of 200 ms each way.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Connections must not outlive their mesh or be shared with another one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config", _SERVICE_CONFIG),
)


class NotTrustedError(UnreachableError):
    """The peer's certificate was not accepted; trying again does not help."""


class LeaseEndedError(NotFoundError):
    """A snapshot's lease ended before it was read; pin again."""


Result = TypeVar("Result")


_open: weakref.WeakSet[Channels] = weakref.WeakSet()
_parents: list[Channels] = []
"""Channels that were open when this process was forked: gRPC's threads, which all other calls
need, are the parent's."""
os.register_at_fork(after_in_child=lambda: _parents.extend(_open))


class Channels:
    """One channel per address, made on first use, all closed together.

    `ticket` is called for every request, with the rank that is shown it (None: the control plane),
    so a renewed ticket needs no new channel.
    """

    OPTIONS: ClassVar = CHANNEL_OPTIONS

    def __init__(
        self,
        ticket: Callable[[int | None], str],
        *,
        tls: ClientTls | None = None,
        job_tls: Callable[[], Pems | None] = lambda: None,
        relay: TunnelRelay | None = None,
    ) -> None:
        """No I/O. Raises UsageError if this process is a fork of one with open channels.

        `tls` is for grpcs:// addresses (None reads it from the environment), `job_tls`, the job's
        certificates, for mtls://, and `relay` for addresses that cannot be reached from here.
        """
        if _parents:
            raise UsageError(
                f"process {os.getpid()} is a fork of one that was connected to a job, and gRPC "
                "does not work in a fork: start the process by spawn (in a DataLoader: "
                "multiprocessing_context='spawn'), or fork before paramd.connect"
            )
        _open.add(self)
        self._job_tls = job_tls
        self._relay = relay
        self._ticket = ticket
        self._tls = tls if tls is not None else ClientTls.from_environment()
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._methods: dict[str, tuple[grpc.aio.Channel, dict[str, Any]]] = {}
        """Methods that were called, by address, of the channel that is open there."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._retired: list[grpc.aio.Channel] = []
        self._stream_tls: tuple[tuple[int, ...], ssl.SSLContext] | None = None
        self.without_streams: dict[str, float] = {}
        """Addresses whose port for streams failed: time of the next try, on the monotonic clock."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` ("host:port", or "grpcs://host:port"). No connection yet.

        Raises:
            DeniedError: For another host without TLS.
            UsageError: If a TLS file cannot be read.
            StrangerError: If another user listens where a server of ours was.
        """
        target, way = address, ""
        if self._relay is not None and is_relayed(address):
            target, way = self._relay.way(address)
        if not way and address not in self._channels:
            way = _own_way(target)
        tls = tls_for(target, self._tls, self._job_tls())
        stamp = tls.stamp() if is_secure(target) and tls is not None else ()
        if address in self._channels and self._stamps[address] != stamp:
            # gRPC reads certificates once per channel; calls in flight keep the old ones.
            self._retired.append(self._channels.pop(address))
        if address not in self._channels:
            self._channels[address] = open_channel(target, tls, options=self.OPTIONS, way=way)
            self._stamps[address] = stamp
        return self._channels[address]

    def method(self, address: str, name: str) -> Any:
        """A method of the sidecar at `address`. Raises as `channel`."""
        channel = self.channel(address)
        kept = self._methods.get(address)
        if kept is None or kept[0] is not channel:
            kept = self._methods[address] = channel, {}
        if name not in kept[1]:
            # A stub opens all methods, which takes longer than a call does, and keeps them.
            kept[1][name] = vars(sidecar_pb2_grpc.SidecarServiceStub(channel))[name]
        return kept[1][name]

    def stream_tls(self, address: str) -> ssl.SSLContext | None:
        """TLS of bulk streams beside `address`; None without.

        Raises:
            UsageError: As `channel`.
        """
        if not is_secure(address):
            return None
        tls = tls_for(address, self._tls, self._job_tls())
        assert tls is not None
        stamp = tls.stamp()
        if self._stream_tls is None or self._stream_tls[0] != stamp:
            self._stream_tls = stamp, tls.ssl_context(ssl.TLSVersion.TLSv1_3)
        return self._stream_tls[1]

    async def is_back(self, address: str) -> None:
        """Drop a channel in reconnect backoff, now that the peer is known to respond again.

        Until the backoff is over gRPC fails calls with the last error, even though a sidecar
        restarted at its old address could be reached.
        """
        channel = self._channels.get(address)
        if channel is not None and channel.get_state() is _WAITS_TO_RETRY:
            del self._channels[address]
            await channel.close()

    async def keep_only(self, addresses: frozenset[str]) -> None:
        gone = [self._channels.pop(a) for a in list(self._channels) if a not in addresses]
        self._methods = {a: kept for a, kept in self._methods.items() if a in addresses}
        await asyncio.gather(*(channel.close() for channel in gone))

    async def close(self) -> None:
        _open.discard(self)
        await self.keep_only(frozenset())
        retired, self._retired = self._retired, []
        await asyncio.gather(*(channel.close() for channel in retired))

    async def schedule(
        self, address: str, request: control_pb2.ScheduleBoundaryRequest, *, timeout_s: float
    ) -> control_pb2.ScheduleBoundaryResponse:
        """Call the control plane's ScheduleBoundary. Raises the ParamdError of the gRPC status."""
        call: Any = control_pb2_grpc.ControlServiceStub(self.channel(address)).ScheduleBoundary
        metadata = (*self.credentials(None), *errors.metadata())
        with told_errors("control plane"):
            found: control_pb2.ScheduleBoundaryResponse = await call(
                request, timeout=call_timeout_s(timeout_s), metadata=metadata
            )
        return found

    async def ask(self, asked: Asked, method: str, request: Any, *, timeout_s: float) -> Any:
        """Call a unary method of a sidecar; the response is checked to come from its rank.

        Raises the ParamdError of the gRPC status, with the rank in its message, or as
        `Asked.check`.
        """
        try:
            with told_errors(asked.who):
                answer = await self.open(asked, method, request, timeout_s=timeout_s)
        except UnreachableError as error:
            why = self._relay.why_not(asked.address) if self._relay is not None else ""
            if not why:
                raise
            # gRPC only reports that its connection ended.
            raise UnreachableError(f"{asked.who}: {why}") from error
        asked.check(answer.header)
        return answer

    def open(self, asked: Asked, method: str, request: Any, *, timeout_s: float) -> Any:
        """Start a call of a sidecar's method. Raises gRPC's errors; responses are unchecked."""
        return self.method(asked.address, method)(request, **self._terms(asked, timeout_s))

    async def stage(
        self, asked: Asked, requests: AsyncIterator[bytes], *, timeout_s: float
    ) -> sidecar_pb2.StageEditResponse:
        """Call StageEdit with serialized requests. Raises gRPC's errors, or as `Asked.check`."""
        method: Any = self.channel(asked.address).stream_unary(
            "/paramd.v1.SidecarService/StageEdit",
            response_deserializer=sidecar_pb2.StageEditResponse.FromString,
        )
        answer: sidecar_pb2.StageEditResponse = await method(
            requests, **self._terms(asked, timeout_s)
        )
        asked.check(answer.header)
        return answer

    def read(
        self, asked: Asked, request: sidecar_pb2.ReadSnapshotRequest, *, timeout_s: float
    ) -> AsyncIterator[Chunk]:
        """The chunks of a snapshot. Closing the iterator cancels the call.

        Raises gRPC's errors: the caller decides whether and where to resume. Raises as
        `Asked.check` before the first chunk.
        """
        call = self.channel(asked.address).unary_stream(
            "/paramd.v1.SidecarService/ReadSnapshot",
            request_serializer=sidecar_pb2.ReadSnapshotRequest.SerializeToString,
            response_deserializer=parse_chunk,
        )(request, **self._terms(asked, timeout_s))
        return _stream(call, asked)

    def _terms(self, asked: Asked, timeout_s: float) -> dict[str, Any]:
        metadata = (*self.credentials(asked.rank), *asked.metadata())
        return {"timeout": call_timeout_s(timeout_s), "metadata": metadata}

    def credentials(self, rank: int | None) -> tuple[tuple[str, str], ...]:
        """The metadata of a call to a rank's sidecar; None for the control plane."""
        return (("authorization", f"Bearer {self._ticket(rank)}"),)


def _own_way(address: str) -> str:
    """As `loopback.way_to`, for an address on loopback without TLS; "" for all others."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if is_secure(address) or not is_loopback(host) or not port.isdecimal():
        return ""
    return loopback.way_to("127.0.0.1" if host == "localhost" else host, int(port))


@contextmanager
def told_errors(who: str) -> Iterator[None]:
    """Translate gRPC errors of the block into ParamdErrors.

    A call whose channel is closed under it, because the peer has left the mesh, raises
    CancelledError although its task was not cancelled; that, and a call on a closed channel,
    becomes an UnreachableError.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error, who) from error
    except grpc.aio.UsageError as error:
        raise UnreachableError(
            f"{who}: its sidecar was lost before the call; try again in a few seconds"
        ) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnreachableError(
            f"{who}: its sidecar was lost in the middle of the call; try again in a few seconds"
        ) from error


def call_timeout_s(left_s: float) -> float:
    """Timeout of one call when `left_s` seconds remain overall."""
    return min(max(left_s, 0.001), MAX_CALL_S)


async def _stream(call: Any, asked: Asked) -> AsyncIterator[Chunk]:
    # `read` has less overhead per message than the call's own iterator.
    try:
        first = True
        while (chunk := await call.read()) is not grpc.aio.EOF:
            if first:
                asked.check(chunk.header)
                first = False
            yield chunk
        if await call.code() is not grpc.StatusCode.OK:
            await call
    finally:
        call.cancel()


async def watched(
    call: Awaitable[Result],
    probe: Callable[[], Awaitable[object]],
    *,
    after_s: float = _PROBE_AFTER_S,
) -> Result:
    """Await `call`; probe the peer every `after_s` seconds and raise if a probe fails."""
    task = asyncio.ensure_future(call)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=after_s)
            if done:
                return task.result()
            probing = asyncio.ensure_future(probe())
            try:
                await asyncio.wait({task, probing}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    await probing
            finally:
                await cancelled(probing)
    finally:
        await cancelled(task)


async def ended(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all have ended, even while cancelled: they may write into a caller's memory."""
    waiting, again = set(futures), False
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError:
            again = True
            waiting = {one for one in waiting if not one.done()}
    if again:
        raise asyncio.CancelledError


async def all_ended(
    work: Iterable[Awaitable[Result]], undo: Callable[[Result], object] = lambda result: None
) -> list[Result]:
    """Run all concurrently; after a failure cancel the rest, `undo` finished ones; await all."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        try:
            await ended(tasks)
        finally:
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    undo(task.result())
        raise


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for it; its result or exception is dropped."""
    if not task.done():
        task.cancel()
        await ended({task})
    if not task.cancelled():
        task.exception()


def why_not_trusted(error: grpc.aio.AioRpcError) -> str:
    """The problem with a peer's certificate, and the remedy; empty if it is something else."""
    # gRPC reports it in BoringSSL's words alone.
    _, refused, why = (error.details() or "").partition("CERTIFICATE_VERIFY_FAILED: ")
    if not refused:
        return ""
    why = why.removesuffix(": OK")
    cure = "it is of another CA, or for another name, than is expected here (PARAMD_TLS_CA)"
    if "expired" in why or "not yet valid" in why:
        cure = (
            "if no host's clock is wrong, it has come to its end. One of the operator's needs new "
            "files (PARAMD_TLS_CERT); one of the job's own (mtls://) lasts a year: attach again"
        )
    return f"has a certificate that cannot be trusted: {why}; {cure}"


_NO_ANSWER: Final = "Deadline Exceeded"
"""gRPC's own text, of a call that its client has given up: the peer has said nothing."""


def error_of(error: grpc.aio.AioRpcError, who: str) -> ParamdError:
    """The domain error for a gRPC status; `who` names the peer."""
    code = error.code()
    details = error.details() or code.name
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and details == _NO_ANSWER:
        details = "no answer within the time left for this call: it is stopped, slow, or waits for "
        details += "the training; allow more time (timeout=)"
    if why := why_not_trusted(error):
        return NotTrustedError(f"{who} {why}")
    # A draining server cancels running calls: to a client that is an outage.
    name = "UNAVAILABLE" if code is grpc.StatusCode.CANCELLED else code.name
    return error_of_grpc(name)(f"{who}: {details}")
