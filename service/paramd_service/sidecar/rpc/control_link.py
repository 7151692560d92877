"""The stream to the control plane: this rank's state, at every lasting change and periodically.

Nothing here depends on the control plane being up, however long it is down.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio

from paramd.errors import ConflictError, DeniedError, ParamdError
from paramd.mesh.peers.grpc import Asked, Channels
from paramd.places import host_id
from paramd.security.tickets import NONCE_BYTES
from paramd.security.tls import open_channel, tls_for
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc, sidecar_pb2
from paramd.version import __version__
from paramd_service.aio import stopped
from paramd_service.sidecar.owner import Mesh, Ownership
from paramd_service.sidecar.phase import LASTING
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages

FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 15.0
LOOKS = 3
"""Attempts after which the pauses between two looks for a first control plane stop growing."""
JOINS_PER_S = 400.0
"""Average rate at which sidecars may rejoin a control plane, per second."""

LOOK_S = 1.0
"""Polling interval for lasting changes: a stopped or stalled trainer announces nothing."""
FIRST_PORT, LAST_PORT = 1024, 65_535
"""Ports to which a control plane may move."""
ASK_S = 2.0
"""How long rank 0 may take to report the control plane's address."""

PROOF_S = 20.0
"""Timeout of the control plane's proof: thousands of ranks may ask for one at once."""

GOODBYE_S = 2.5
"""Timeout of the last report; a detaching trainer waits for it."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # Longest time to connect, 20 s by default: another program may have taken the port.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def backoff_s(attempt: int, jitter: float, *, world_size: int = 1) -> float:
    """Pause before the next attempt, after `attempt` failed ones; `jitter` is random, in [0, 1).

    All ranks lose a control plane at the same moment, so their pauses are spread over the time
    it needs to readmit them, and grow with every failed attempt.
    """
    full_s = min(FIRST_BACKOFF_S * 2.0 ** min(attempt, 16), LAST_BACKOFF_S)
    spread_s = max(full_s, world_size / JOINS_PER_S)
    return 0.5 * full_s + jitter * (spread_s - 0.5 * full_s)


def may_be_at(address: str, mesh: Mesh) -> bool:
    """Whether the control plane may have moved to `address`, which another rank named: to another
    port of the host where it was, or of rank 0's, and no privileged one. Nothing else is dialed:
    a rank that lies could have all others connect to whatever it names."""
    # One that was late at attach had no address yet: it has TLS if rank 0 has.
    known = mesh.control_address or mesh.address_of(0)
    scheme, _, there = known.rpartition("://")
    named, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    hosts = {one.rpartition("://")[2].rpartition(":")[0] for one in (there, mesh.address_of(0))}
    plain = port.isascii() and port.isdecimal() and FIRST_PORT <= int(port[:6]) <= LAST_PORT
    return named == scheme and bool(host) and host in hosts and plain


class Joining:
    """Keeps one Join stream open while there is a mesh with a control plane."""

    def __init__(self, rank: RankSidecar, *, address: str) -> None:
        self._rank = rank
        self._address = address
        self._changed = asyncio.Event()
        self._interval_s = rank.config.report_s
        self._task: asyncio.Task[None] | None = None
        rank.on_change.append(self._changed.set)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="paramd-joining")

    async def stop(self) -> None:
        """Send the last report if the trainer detached, then end the stream. Idempotent."""
        if self._task is None:
            return
        if self._rank.detached:
            # The last report says `leaving`; the stream then ends by itself.
            await asyncio.wait([self._task], timeout=GOODBYE_S)
        await stopped(self._task)
        self._task = None

    async def _run(self) -> None:
        attempt = 0
        while not self._rank.detached:
            mesh = self._rank.mesh
            if mesh is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            # Without an address the control plane was late at attach, or a site was away: it is
            # looked for like one that has moved.
            if mesh.control_address and await self._try(mesh, attempt):
                attempt = 0
            if not self._rank.detached and await self._moved(mesh):
                attempt = 0
            elif not self._rank.detached:
                # One that was never there is not tried, only looked for, which costs it nothing.
                times = attempt if mesh.control_address else min(attempt, LOOKS)
                pause_s = backoff_s(times, random.random(), world_size=self._world_size)
                await self._pause(pause_s, mesh)
                attempt += 1

    async def _try(self, mesh: Mesh, attempt: int) -> bool:
        """Join once; return whether the control plane admitted us. The next try may succeed."""
        try:
            return await self._join(mesh)
        except Exception as error:
            if attempt == 0:
                self._rank.log("control-plane-away", error=short(error))
            return False

    async def _pause(self, pause_s: float, mesh: Mesh) -> None:
        """Wait, but only until the control plane has another address."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                while self._rank.mesh is mesh:
                    self._changed.clear()
                    await self._changed.wait()

    async def _moved(self, mesh: Mesh) -> bool:
        """Whether the control plane has another address now, which this rank then knows."""
        rank = self._rank
        await rank.find_control()
        if rank.mesh is mesh and rank.config.rank:
            # The control plane runs on rank 0's host, perhaps another one. Whatever rank 0 says,
            # the server at that address has to prove itself.
            with suppress(ParamdError, grpc.aio.AioRpcError):
                address = await self._asked(0)
                if address != mesh.control_address and may_be_at(address, mesh):
                    async with self._channel(address) as channel:
                        await self._prove(channel, address)
                    rank.move_control(address)
        return rank.mesh is not mesh

    async def _asked(self, number: int) -> str:
        """The control plane's address, as another rank knows it. Raises ParamdError."""
        rank, attached = self._rank, self._rank.attached
        address = rank.ready_mesh().address_of(number)
        if attached is None or not address:
            return ""
        # New channels, since a channel in backoff repeats its last error; and no ticket, which
        # the other rank could show as its own.
        channels = Channels(lambda _rank: "", job_tls=rank.job_tls)
        asked = Asked(
            job=rank.config.job, incarnation=rank.incarnation, rank=number, address=address
        )
        try:
            found: sidecar_pb2.FindControlResponse = await channels.ask(
                asked, "FindControl", sidecar_pb2.FindControlRequest(), timeout_s=ASK_S
            )
        finally:
            await channels.close()
        return found.control_address

    def _channel(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, tls_for(address, None, self._rank.job_tls()), options=_OPTIONS)

    async def _prove(self, channel: grpc.aio.Channel, address: str) -> None:
        """Have whoever listens at the address prove, by the job's key, to be the control plane.
        Raises DeniedError: it does not. gRPC's errors: nobody answers."""
        rank, nonce = self._rank, secrets.token_bytes(NONCE_BYTES)
        request = control_pb2.ProveControlRequest(
            job=rank.config.job, incarnation=rank.incarnation, address=address, nonce=nonce
        )
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        answer = await stub.ProveControl(request, timeout=PROOF_S)
        self._check(answer.header)
        if not rank.is_proven(answer.signature, address, nonce):
            raise DeniedError(
                f"{address} is not this job's control plane; no ticket is shown there"
            )

    async def _join(self, mesh: Mesh) -> bool:
        """Run one stream until it ends; return whether the control plane admitted us."""
        joined = False
        self._interval_s = self._rank.config.report_s
        async with self._channel(mesh.control_address) as channel:
            await self._prove(channel, mesh.control_address)
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            call = stub.Join(self._reports(mesh), metadata=self._metadata())
            try:
                async for welcome in call:
                    self._check(welcome.header)
                    # Raises for a fenced generation, which ends the stream.
                    self._rank.follow_control(welcome.generation)
                    self._rank.take_time(welcome.now_ns / 1e9)
                    self._take_revoked(welcome.revoked)
                    if welcome.report_interval_ms > 0:
                        self._interval_s = welcome.report_interval_ms / 1000
                    joined = True
            except (grpc.aio.AioRpcError, ConflictError) as error:
                if not joined:
                    raise
                self._rank.log("control-plane-lost", error=short(error))
            finally:
                call.cancel()
        return joined

    def _check(self, header: common_pb2.Header) -> None:
        """Raise ConflictError if another job's control plane answers."""
        job, incarnation = self._rank.config.job, self._rank.incarnation
        if (header.job, header.incarnation) != (job, incarnation):
            raise ConflictError(
                f"the control plane there serves job {header.job!r}, run "
                f"{header.incarnation}; this is a rank of job {job!r}, run {incarnation}"
            )

    def _take_revoked(self, told: control_pb2.Revocations) -> None:
        ended = self._rank.revocations.update(told)
        if told.token_ids:
            self._rank.log("tokens-revoked", tokens=len(told.token_ids), ended_calls=ended)

    async def _reports(self, mesh: Mesh) -> AsyncIterator[control_pb2.JoinRequest]:
        while self._rank.mesh is mesh:
            # Both before the report is built: a later change wakes `_until_due`, and a rank that
            # detaches while the report is being sent still sends the last one.
            self._changed.clear()
            last = self._rank.detached
            report = self._report()
            yield report
            if last:
                return
            await self._until_due(report.state.phase)

    async def _until_due(self, reported: common_pb2.Phase.ValueType) -> None:
        """Wait for a lasting change or until the next report is due."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while (left_s := begun_s + self._interval_s - loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_S)):
                    await self._changed.wait()
                return
            now = messages.doing_now(self._rank).phase
            if now != reported and (now in LASTING or reported in LASTING):
                return

    @property
    def _world_size(self) -> int:
        attached = self._rank.attached
        return attached.request.world_size if attached is not None else 1

    def _report(self) -> control_pb2.JoinRequest:
        rank = self._rank
        return control_pb2.JoinRequest(
            header=messages.header(rank),
            world_size=self._world_size,
            peer=common_pb2.Peer(
                rank=rank.config.rank,
                address=self._address,
                socket_path=str(rank.config.socket_path),
                host_id=host_id(),
            ),
            state=messages.rank_state(rank),
            leaving=rank.detached and rank.ownership is Ownership.OWNED,
            version=__version__,
        )

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        attached = self._rank.attached
        assert attached is not None
        return (("authorization", f"Bearer {attached.request.rank_ticket}"),)


def short(error: Exception) -> str:
    """The error for one line of the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
