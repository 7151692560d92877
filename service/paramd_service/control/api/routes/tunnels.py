"""Tunnels: bytes to a sidecar and back, for clients that reach nothing but this port.

The caller still needs a ticket for the sidecar, and within a job on several hosts speaks TLS with
it: the tunnel adds no right and reads nothing.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paramd.errors import NotFoundError, UnreachableError, UsageError
from paramd.mesh.peers.tunnels import PROTOCOL
from paramd.security.tls import host_of
from paramd_service.control.access.doorway import Carrier, Upstream
from paramd_service.control.api.services import Services

CONNECT_S = 3.0


class Tunnel(Response):
    """Turns the request's connection into one to somewhere else, until either side ends it."""

    def __init__(self, carrier: Carrier, upstream: Upstream) -> None:
        super().__init__()
        self._carrier, self._upstream = carrier, upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        try:
            self._carrier.carry(self._upstream)
            await asyncio.wait({gone, self._upstream.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            self._upstream.close()
            self._carrier.shut()


async def _gone(receive: Receive) -> None:
    """Wait until the caller has left, or its token has been revoked."""
    while (await receive())["type"] != "http.disconnect":
        pass


def router(services: Services) -> APIRouter:
    """/jobs/{job}/tunnel, /jobs/{job}/ranks/{rank}/tunnel."""
    routes = APIRouter(tags=["jobs"])

    async def opened(request: Request, what: str, address: str) -> Response:
        if request.headers.get("upgrade", "").lower() != PROTOCOL:
            raise UsageError(f"tunnel: expected headers Connection: upgrade, Upgrade: {PROTOCOL}")
        client = request.client
        carrier = (
            services.doorway.carrier((client.host, client.port)) if client is not None else None
        )
        if carrier is None:
            raise UsageError("tunnel: this connection cannot be upgraded")
        upstream = Upstream(carrier)
        host, port = host_of(address), int(address.rpartition(":")[2])
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: upstream, host, port)
        except OSError as error:
            why = str(error) or f"no answer in {CONNECT_S:.0f} s"
            raise UnreachableError(
                f"the control plane does not reach {what} at {host}:{port} ({why})"
            ) from error
        return Tunnel(carrier, upstream)

    @routes.get("/jobs/{job}/tunnel", status_code=101, response_class=Response)
    async def open_control_tunnel(job: str, request: Request) -> Response:
        """A connection to this control plane's gRPC. Upgrade: paramd-tunnel."""
        services.jobs.get(job)
        return await opened(request, "its own gRPC", services.grpc_address)

    @routes.get("/jobs/{job}/ranks/{rank}/tunnel", status_code=101, response_class=Response)
    async def open_tunnel(job: str, rank: Annotated[int, Path(ge=0)], request: Request) -> Response:
        """A connection to the sidecar of one rank. Upgrade: paramd-tunnel."""
        for report in services.jobs.get(job).registry.view().joined:
            if report.rank == rank:
                return await opened(request, f"rank {rank}", report.address)
        raise NotFoundError(f"rank {rank} of job {job[:64]!r} has no sidecar now")

    return routes
