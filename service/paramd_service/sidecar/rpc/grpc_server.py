"""The gRPC server of a sidecar: SidecarService, health and reflection; streams beside it."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from paramd.errors import UsageError
from paramd_service.admission import CALLER, CONNECTION_OPTIONS, Doors, Shares
from paramd_service.beside import listen_beside
from paramd_service.sidecar.calls import SERVICE, AuthInterceptor
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc.service import SidecarServicer
from paramd_service.sidecar.rpc.streams import StreamServer
from paramd_service.tls import ServerTls, advertised, grpc_address

MAX_REFLECTIONS = 16

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CONNECTION_OPTIONS,
    # HTTP/2's maximum: fewer frames for the same bytes.
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    # The manifest of an edit of 100,000 tensors. Calls are refused by their metadata, before that.
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # Two sidecars must never share a port.
    ("grpc.so_reuseport", 0),
    # Notice stopped peers, and drop dead connections.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 10),
)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """Health of "" means that the process runs; that of the service, that it has a mesh."""

    def __init__(self, rank: RankSidecar) -> None:
        self.address = ""
        self._streams = StreamServer(rank)
        self._rank = rank
        self._health = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen and serve.

        Raises:
            UsageError: If it cannot listen on the address.
        """
        doors = Doors(
            # The servicer counts its own calls, depending on their work.
            counted=lambda method: not method.startswith(f"/{SERVICE}/"),
            calls=Shares(MAX_REFLECTIONS, "calls"),
            who=CALLER.get,
        )
        rank = self._rank
        self._server = server = grpc.aio.server(
            interceptors=[
                AuthInterceptor(rank.verify, rank.check_meant, rank.refusals.saw, rank.note_client),
                doors,
            ],
            options=SERVER_OPTIONS,
        )
        servicer = SidecarServicer(self._rank, self._streams)
        server.add_generic_rpc_handlers((servicer.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self.address = self._bind(server)
        self._streams.start()
        await self._health.set(SERVICE, _NOT_SERVING)
        self._rank.on_change.append(self._report_health)
        await server.start()

    async def say_not_serving(self) -> None:
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once; cancel running ones after the grace time."""
        if self._server is not None:
            await self._server.stop(grace_s)
        await self._streams.close()

    def _bind(self, server: grpc.aio.Server) -> str:
        config = self._rank.config
        listen, own = config.listen, self._rank.own_pems
        source = own if own is not None else config.tls_files
        host = listen.rpartition(":")[0].removeprefix("[").removesuffix("]")
        name = advertised(host, config.advertise, tls=source is not None)
        tls = self._rank.tls = ServerTls(source) if source is not None else None

        def add(address: str) -> str:
            if tls is None:
                port = server.add_insecure_port(address)
                listen_beside(server, host, port)
            else:
                port = server.add_secure_port(address, tls.grpc_credentials())
            return grpc_address(name, port, tls=tls is not None, of_job=own is not None)

        try:
            return add(listen)
        except RuntimeError:
            # A restarted sidecar gets the port of the last one, which may be taken by now.
            self._rank.log("port-taken", listen=listen)
        try:
            return add(f"{listen.rpartition(':')[0]}:0")
        except RuntimeError as error:
            raise UsageError(f"listen: cannot listen on {listen!r} ({error})") from error

    def _report_health(self) -> None:
        status = _SERVING if self._rank.mesh is not None else _NOT_SERVING
        self._rank.start_task(self._health.set(SERVICE, status))
