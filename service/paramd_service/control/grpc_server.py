"""The control plane's gRPC server: ControlService, health, reflection."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paramd.clock import now_s
from paramd.errors import DeadlineError, DeniedError, ExhaustedError, NotFoundError, UsageError
from paramd.places import check_job_name
from paramd.security.tickets import NONCE_BYTES
from paramd.security.tls import RANK_NAME
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc
from paramd_service.admission import CONNECTION_OPTIONS, Doors, Notice, Shares, TokenRevokedError
from paramd_service.beside import listen_beside
from paramd_service.control.access.authority import Denied
from paramd_service.control.access.join import (
    TicketInterceptor,
    caller_rank,
    caller_token,
    check_incarnation,
    check_rank,
    errors_as_statuses,
)
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.base.endpoint import Address, bind_grpc
from paramd_service.control.mesh.jobs import Incarnation, Jobs
from paramd_service.control.mesh.origin import origin_of
from paramd_service.control.mesh.registry import Member
from paramd_service.tls import ServerTls

MAX_TIMEOUT_S = 600.0
MAX_SNAPSHOTS = 100_000
MAX_SNAPSHOT_ID_CHARS = 128
MAX_STREAMS_OF_RANK = 4
"""Join streams per rank: its sidecar's, and those left by stopped sidecars before it."""
FIRST_REPORT_S = 10.0
"""Time limit for a Join stream's first report, which identifies it."""
LOGGED_RANKS = 64
"""Largest mesh whose joins and leaves are logged at INFO."""

SERVICE = "paramd.v1.ControlService"
JOIN = f"/{SERVICE}/Join"
CALLERS = 256
"""Most concurrent calls other than sidecars' Join."""
STRANGERS = 256
"""Most concurrent calls that are not yet authenticated or need no ticket."""

OPTIONS: tuple[tuple[str, int], ...] = (
    *CONNECTION_OPTIONS,
    # With reuseport, binding a taken port would succeed.
    ("grpc.so_reuseport", 0),
    # Detect a stopped sidecar or client within seconds, and let them ping as often.
    ("grpc.keepalive_time_ms", 2_500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)

Requests: TypeAlias = AsyncIterator[control_pb2.JoinRequest]

log = logging.getLogger("paramd.control")


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Translates between messages and `Jobs`."""

    def __init__(self, jobs: Jobs, revocations: Revocations, address: Callable[[], str]) -> None:
        self._jobs = jobs
        self._revocations = revocations
        self._address = address
        self._streams: Counter[tuple[str, int, int | None]] = Counter()

    async def ProveControl(
        self, request: control_pb2.ProveControlRequest, context: Any
    ) -> control_pb2.ProveControlResponse:
        async with errors_as_statuses(context, "ProveControl"):
            mine = self._address()
            if request.address != mine:
                raise NotFoundError(f"the control plane here is at {mine}, and nowhere else")
            if len(request.nonce) != NONCE_BYTES:
                raise UsageError(f"nonce: {len(request.nonce)} bytes; expected {NONCE_BYTES}")
            check_job_name(request.job)
            signer = self._jobs.signer(request.job, request.incarnation)
            header = common_pb2.Header(
                job=request.job, incarnation=request.incarnation, step=-1, rank=-1
            )
            return control_pb2.ProveControlResponse(
                header=header, signature=signer.prove(mine, request.nonce)
            )
        raise AssertionError("errors have become statuses")

    # A coroutine that writes, not a generator: revocations are sent while it awaits reports.
    async def Join(  # type: ignore[override]
        self, request_iterator: Requests, context: Any
    ) -> None:
        async with errors_as_statuses(context, "Join"):
            with self._one_stream():
                await self._join(request_iterator, context)

    @contextmanager
    def _one_stream(self) -> Iterator[None]:
        caller = caller_rank()
        if self._streams[caller] >= MAX_STREAMS_OF_RANK:
            raise ExhaustedError(
                f"rank {caller[2]} has {MAX_STREAMS_OF_RANK} Join streams already; end one"
            )
        self._streams[caller] += 1
        try:
            yield
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _join(self, request_iterator: Requests, context: Any) -> None:
        try:
            async with asyncio.timeout(FIRST_REPORT_S):
                first = await anext(request_iterator, None)
        except TimeoutError:
            raise DeadlineError(f"Join: no report within {FIRST_REPORT_S:.0f} s") from None
        if first is None:
            raise UsageError("Join: the stream ended before its first report")
        header = first.header
        check_incarnation(header.job, header.incarnation)
        check_rank(header.rank)
        _check_certificate(context, header.rank)
        token_id = caller_token()
        if await self._revocations.has_ended(token_id):
            raise _token_ended()
        mesh = await self._jobs.admit(
            header.job, header.incarnation, first.world_size, owner=token_id
        )
        origin = await origin_of(
            header.rank, first.peer.address, context.peer(), mesh.terms.sidecar_networks
        )
        # Before it counts as joined: waiting callers call the rank right away.
        await mesh.calls.is_back(first.peer.address)
        member = mesh.registry.join(first, origin)
        _log_join(mesh, member, f"joined from {first.peer.address}")
        try:
            with self._revocations.following(token_id) as ended:
                async with self._revocations.telling(
                    lambda notice: context.write(_welcome(mesh, notice))
                ):
                    await mesh.follow(_read(mesh, member, request_iterator), ended)
            if ended.done():
                raise _token_ended()
        finally:
            mesh.registry.lose(member)
            _log_join(mesh, member, "its stream has ended")

    async def ScheduleBoundary(
        self, request: control_pb2.ScheduleBoundaryRequest, context: Any
    ) -> control_pb2.ScheduleBoundaryResponse:
        async with errors_as_statuses(context, "ScheduleBoundary"):
            check_incarnation(request.job, request.incarnation)
            mesh = self._jobs.at(request.job, request.incarnation)
            snapshots = _snapshots(request, mesh.bootstrap.world_size)
            timeout_s = context.time_remaining()
            if timeout_s is None or timeout_s > MAX_TIMEOUT_S:
                raise UsageError(f"deadline: expected one of at most {MAX_TIMEOUT_S:.0f} s")
            verdict = await mesh.coordinator.schedule(snapshots, timeout_s=timeout_s)
            return control_pb2.ScheduleBoundaryResponse(
                header=_header(mesh, verdict.step, verdict.edits, verdict.history, verdict.token),
                captured=verdict.captured,
                reason=verdict.reason,
            )
        raise AssertionError("errors have become statuses")


def _token_ended() -> TokenRevokedError:
    return TokenRevokedError(
        "the token that registered this job has been revoked or has expired, and its ranks' "
        "tickets with it; training continues unserved until it is started with another token"
    )


def _check_certificate(context: Any, rank: int) -> None:
    """Raise DeniedError if the certificate is another rank's, where every rank has its own."""
    names = context.auth_context().get("x509_common_name", ())
    told = [name.decode(errors="replace") for name in names]
    if any(name.startswith(RANK_NAME) and name != f"{RANK_NAME}{rank}" for name in told):
        raise DeniedError(f"{told[0]!r} calls as rank {rank}; each rank has its own key")


async def _read(mesh: Incarnation, member: Member, requests: Requests) -> None:
    async for request in requests:
        mesh.registry.update(member, request)


def _log_join(mesh: Incarnation, member: Member, what: str) -> None:
    # Thousands of ranks would each log a line, repeatedly: only at DEBUG.
    small = mesh.bootstrap.world_size <= LOGGED_RANKS
    level = logging.INFO if small else logging.DEBUG
    job, incarnation = mesh.job, mesh.number
    log.log(level, "job %s, run %d, rank %d: %s", job, incarnation, member.rank, what)


def _welcome(mesh: Incarnation, notice: Notice) -> control_pb2.JoinResponse:
    return control_pb2.JoinResponse(
        header=_header(mesh),
        generation=mesh.terms.generation,
        report_interval_ms=round(mesh.report_interval.interval_s * 1000),
        revoked=control_pb2.Revocations(
            token_ids=notice.token_ids,
            keep_ms=math.ceil(notice.keep_s * 1000),
            refused_before_ns=math.ceil(notice.refused_before_s * 1e9),
        ),
        now_ns=round(now_s() * 1e9),
    )


def _snapshots(
    request: control_pb2.ScheduleBoundaryRequest, world_size: int
) -> dict[int, list[str]]:
    if len(request.snapshots) > MAX_SNAPSHOTS:
        raise UsageError(f"snapshots: more than {MAX_SNAPSHOTS}")
    found: dict[int, list[str]] = defaultdict(list)
    for reference in request.snapshots:
        if not 0 <= reference.rank < world_size:
            raise UsageError(f"snapshots: rank {reference.rank}; expected 0 to {world_size - 1}")
        if not 0 < len(reference.snapshot_id) <= MAX_SNAPSHOT_ID_CHARS:
            raise UsageError("snapshots: an id is empty or too long")
        found[reference.rank].append(reference.snapshot_id)
    return found


def _header(
    mesh: Incarnation, step: int = -1, edits: int = -1, history: int = 0, token: int = 0
) -> common_pb2.Header:
    return common_pb2.Header(
        job=mesh.job,
        incarnation=mesh.number,
        step=step,
        edits=edits,
        history=history,
        boundary_token=token,
        rank=-1,
        layout_digest=mesh.registry.layout_digest,
    )


class GrpcServer:
    """Life cycle: `start`, `say_stopping`, `stop`. Single event loop."""

    def __init__(self) -> None:
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(
        self,
        jobs: Jobs,
        revocations: Revocations,
        wanted: Address,
        *,
        address: Callable[[], str],
        ranks: int,
        denied: Denied,
        tls: ServerTls | None,
    ) -> Address:
        """Start serving; return the bound address. `address`: our target as sidecars are given it,
        once it is known. `ranks`: most sidecars admitted across all jobs. `denied` is called for
        each refused call. Raises as `bind_grpc`."""
        doors = Doors(
            counted=lambda method: method != JOIN, calls=Shares(CALLERS, "calls"), who=caller_token
        )
        server = grpc.aio.server(
            interceptors=[TicketInterceptor(jobs.verifier, revocations.check, denied), doors],
            options=OPTIONS,
            # Every rank's Join streams and all other calls, which `doors` caps lower.
            maximum_concurrent_rpcs=MAX_STREAMS_OF_RANK * ranks + CALLERS + STRANGERS,
        )
        control_pb2_grpc.add_ControlServiceServicer_to_server(
            ControlServicer(jobs, revocations, address), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        credentials = tls.grpc_credentials if tls is not None else None
        bound = bind_grpc(server, wanted, credentials)
        if tls is None:
            listen_beside(server, bound.host, bound.port)
        self._server = server
        await server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return bound

    async def say_stopping(self) -> None:
        """Report NOT_SERVING over the health service."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, drain_s: float) -> None:
        """Stop, giving calls in progress `drain_s` seconds. Safe after a failed start."""
        if self._server is not None:
            await self._server.stop(drain_s)
