"""The gRPC server of a control plane: ControlService, health, reflection."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paramd.v1 import control_pb2_grpc
from paramd_service.control.access.authority import Denied
from paramd_service.control.access.join import OPEN_METHODS, TicketInterceptor, caller_token
from paramd_service.control.access.revocations import Revocations
from paramd_service.control.base.endpoint import Address, bind_grpc
from paramd_service.control.join_service import MAX_STREAMS_OF_RANK, ControlServicer
from paramd_service.control.mesh.jobs import Jobs
from paramd_service.grpc_doors import CONNECTION_OPTIONS, Doors
from paramd_service.shares import Shares
from paramd_service.tls import ServerTls

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
    # Detect a stopped sidecar or client within seconds, and let them ping us as often.
    ("grpc.keepalive_time_ms", 2_500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


class GrpcServer:
    """Life cycle: `start`, `say_stopping`, `stop`. Single event loop."""

    def __init__(self) -> None:
        """No I/O."""
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(
        self,
        jobs: Jobs,
        revocations: Revocations,
        wanted: Address,
        *,
        ranks: int,
        denied: Denied,
        tls: ServerTls | None,
    ) -> Address:
        """Start serving; return the bound address.

        Args:
            ranks: Most sidecars admitted across all jobs.
            denied: Called for each refused call.

        Raises:
            UnreachableError: as `bind_grpc`.
        """
        doors = Doors(
            open_methods=OPEN_METHODS,
            counted=lambda method: method != JOIN,
            calls=Shares(CALLERS, "calls"),
            who=caller_token,
        )
        server = grpc.aio.server(
            interceptors=[TicketInterceptor(jobs.verifier, revocations.check, denied), doors],
            options=OPTIONS,
            # Every rank's Join streams plus the calls of everyone else, which `doors` caps lower.
            maximum_concurrent_rpcs=MAX_STREAMS_OF_RANK * ranks + CALLERS + STRANGERS,
        )
        control_pb2_grpc.add_ControlServiceServicer_to_server(
            ControlServicer(jobs, revocations), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        credentials = tls.grpc_credentials if tls is not None else None
        address = bind_grpc(server, wanted, credentials)
        self._server = server
        await server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return address

    async def say_stopping(self) -> None:
        """Report NOT_SERVING over the health service."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, drain_s: float) -> None:
        """Stop, giving calls in progress `drain_s` seconds. Safe after a failed start."""
        if self._server is not None:
            await self._server.stop(drain_s)
