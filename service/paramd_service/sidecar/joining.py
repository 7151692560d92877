"""The stream to the control plane: this rank's state, at every change and every 2 s.

The control plane may be away for as long as it likes: nothing here depends on it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio

from paramd.places import host_id
from paramd.tickets import Role, mint
from paramd.v1 import common_pb2, control_pb2, control_pb2_grpc
from paramd.version import __version__
from paramd_service.sidecar import messages
from paramd_service.sidecar.mesh_info import Mesh, PeerInfo
from paramd_service.sidecar.owner import Ownership
from paramd_service.sidecar.rank import RankSidecar

FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 15.0
GOODBYE_S = 2.5
"""How long the last report may take; a detaching trainer waits for us meanwhile."""

TICKET_TTL_S = 300.0

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def backoff_s(attempt: int, jitter: float) -> float:
    """Pause before the next attempt; `jitter` in [0, 1) spreads it over its upper half."""
    full_s = min(FIRST_BACKOFF_S * 2.0 ** min(attempt, 16), LAST_BACKOFF_S)
    return full_s * (0.5 + 0.5 * jitter)


class Joining:
    """Keeps one Join stream open while there is a mesh with a control plane."""

    def __init__(self, rank: RankSidecar, *, address: str) -> None:
        self._rank = rank
        self._address = address
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        rank.on_change.append(self._changed.set)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="paramd-joining")

    async def stop(self) -> None:
        """Says goodbye when the trainer detached, then ends the stream. Idempotent."""
        if self._task is None:
            return
        if self._rank.detached:
            # The last report says `leaving`; the stream then ends by itself.
            await asyncio.wait([self._task], timeout=GOODBYE_S)
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None

    async def _run(self) -> None:
        attempt = 0
        while not self._rank.detached:
            mesh = self._rank.mesh
            if mesh is None or not mesh.control_address:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                if await self._join(mesh):
                    attempt = 0
            except Exception as error:  # whatever it is, the next attempt may do better
                if attempt == 0:
                    self._rank.log("control-plane-away", error=_short(error))
            if not self._rank.detached:
                await asyncio.sleep(backoff_s(attempt, random.random()))
                attempt += 1

    async def _join(self, mesh: Mesh) -> bool:
        """One stream, until it ends. Says whether the control plane answered."""
        answered = False
        async with grpc.aio.insecure_channel(mesh.control_address, options=_OPTIONS) as channel:
            stub: Any = control_pb2_grpc.ControlServiceStub(channel)
            call = stub.Join(self._reports(mesh), metadata=self._metadata())
            try:
                async for _answer in call:
                    answered = True
            except grpc.aio.AioRpcError as error:
                if not answered:
                    raise
                self._rank.log("control-plane-lost", error=_short(error))
            finally:
                call.cancel()
        return answered

    async def _reports(self, mesh: Mesh) -> AsyncIterator[control_pb2.JoinRequest]:
        while self._rank.mesh is mesh:
            self._changed.clear()
            # Detached while a report is on its way, the rank still owes the last one.
            last = self._rank.detached
            yield self._report()
            if last:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rank.config.report_s):
                    await self._changed.wait()

    def _report(self) -> control_pb2.JoinRequest:
        rank = self._rank
        possession = rank.possession
        return control_pb2.JoinRequest(
            header=messages.header(rank),
            world_size=possession.request.world_size if possession is not None else 0,
            peer=self._peer(),
            state=messages.rank_state(rank),
            leaving=rank.detached and rank.ownership is Ownership.OWNED,
            version=__version__,
        )

    def _peer(self) -> common_pb2.Peer:
        return messages.peer(
            PeerInfo(
                rank=self._rank.config.rank,
                address=self._address,
                socket_path=str(self._rank.config.socket_path),
                host_id=host_id(),
            )
        )

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        possession = self._rank.possession
        assert possession is not None
        request = possession.request
        ticket = mint(
            request.secret,
            job=request.job,
            epoch=request.epoch,
            role=Role.SIDECAR,
            ttl_s=TICKET_TTL_S,
        )
        return (("authorization", f"Bearer {ticket}"),)


def _short(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
