"""The gRPC server of a control plane: ControlService, health, reflection."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paramd.v1 import control_pb2_grpc
from paramd_service.control.auth import TicketInterceptor
from paramd_service.control.endpoint import Address, bind_grpc
from paramd_service.control.jobs import Jobs
from paramd_service.control.servicer import ControlServicer
from paramd_service.control.tokens.authority import Denied
from paramd_service.control.tokens.revocations import Revocations
from paramd_service.tls import ServerTls

SERVICE = "paramd.v1.ControlService"
CALLERS = 256
OPTIONS: tuple[tuple[str, int], ...] = (
    # A taken port must look taken.
    ("grpc.so_reuseport", 0),
    # A stopped sidecar or client is noticed within seconds; theirs may ping us as often.
    ("grpc.keepalive_time_ms", 2_500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


class GrpcServer:
    """`start`, `say_stopping`, `stop`; on one event loop."""

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
        """Serves, and says where.

        Args:
            ranks: how many sidecars of all jobs together are let in.
            denied: hears of calls that were refused.

        Raises:
            UnreachableError: as `bind_grpc`.
        """
        server = grpc.aio.server(
            interceptors=[TicketInterceptor(jobs.verifier, revocations.check, denied)],
            options=OPTIONS,
            # One Join stream a rank, its successor beside it, and callers.
            maximum_concurrent_rpcs=2 * ranks + CALLERS,
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
        """Health says so from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, drain_s: float) -> None:
        """Calls under way may take `drain_s` seconds. Safe after a failed start."""
        if self._server is not None:
            await self._server.stop(drain_s)
