"""Tunnels: bytes to a sidecar and back, for clients that reach only this port.

The caller still needs a ticket for the sidecar, and speaks TLS with it in a job on several hosts;
the tunnel adds no right and reads nothing.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paramd.errors import NotFoundError, UnreachableError, UsageError
from paramd.mesh.peers.tunnels import PROTOCOL
from paramd.security.tls import host_of
from paramd.v1 import sidecar_pb2
from paramd_service.control.access.doorway import DOOR
from paramd_service.control.api.services import Services
from paramd_service.control.http_server import Connection

CONNECT_S = 3.0

SWITCHING: Final = (
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: paramd-tunnel\r\n\r\n"
)


class _End(asyncio.Protocol):
    """One end of a tunnel: passes what arrives to the other end, as fast as that takes it."""

    def __init__(self) -> None:
        self.other: asyncio.Transport
        """The other end; nothing is read before it is set."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # Nothing may reach the caller before the answer that opens the tunnel.
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.other.write(data)

    def pause_writing(self) -> None:
        self.other.pause_reading()

    def resume_writing(self) -> None:
        self.other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


class Tunnel(Response):
    """Turns the request's connection into one to another server, until either side ends it."""

    def __init__(self, door: Connection, far: _End, upstream: asyncio.Transport) -> None:
        super().__init__()
        self._door, self._far, self._upstream = door, far, upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        near = _End()
        try:
            near.other = self._upstream
            self._far.other = self._door.carry(near)
            self._far.other.write(SWITCHING)
            self._upstream.resume_reading()
            ends = {gone, near.lost, self._far.lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            self._upstream.abort()
            self._door.shut()
        # Only now does uvicorn know that the caller has left, and expect no answer.
        await near.lost


async def _gone(receive: Receive) -> None:
    """Wait until the caller has left, or its token has been revoked."""
    while (await receive())["type"] != "http.disconnect":
        pass


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["jobs"])

    async def opened(request: Request, what: str, host: str, address: str) -> Response:
        if request.headers.get("upgrade", "").lower() != PROTOCOL:
            raise UsageError(f"tunnel: expected headers Connection: upgrade, Upgrade: {PROTOCOL}")
        door: Connection | None = getattr(request.state, DOOR, None)
        if door is None:
            raise UsageError("tunnel: this connection cannot be upgraded")
        port = int(address.rpartition(":")[2])
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                upstream, far = await loop.create_connection(_End, host, port)
        except OSError as error:
            why = str(error) or f"no answer in {CONNECT_S:.0f} s"
            raise UnreachableError(
                f"the control plane does not reach {what} at {host}:{port} ({why})"
            ) from error
        return Tunnel(door, far, upstream)

    @routes.get("/jobs/{job}/tunnel", status_code=101, response_class=Response)
    async def open_control_tunnel(job: str, request: Request) -> Response:
        """A connection to this control plane's gRPC. Upgrade: paramd-tunnel."""
        services.host.jobs.get(job)
        address = services.host.grpc_address
        return await opened(request, "its own gRPC", host_of(address), address)

    @routes.get("/jobs/{job}/ranks/{rank}/tunnel", status_code=101, response_class=Response)
    async def open_tunnel(job: str, rank: Annotated[int, Path(ge=0)], request: Request) -> Response:
        """A connection to the sidecar of one rank. Upgrade: paramd-tunnel."""
        mesh = services.host.jobs.get(job)
        for report in mesh.registry.view().joined:
            if report.rank == rank:
                # Only a sidecar of this rank answers this.
                asked, what = sidecar_pb2.GetStateRequest(), f"rank {rank}"
                await mesh.calls.ask(rank, report.address, asked, timeout_s=CONNECT_S)
                return await opened(request, what, report.host, report.address)
        raise NotFoundError(f"rank {rank} of job {job[:64]!r} has no sidecar now")

    return routes
