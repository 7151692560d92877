"""The hosts that this sidecar's host reaches, and why it does not reach others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramd.errors import ParamdError
from paramd.mesh.peers.grpc import Channels, why_not_trusted
from paramd.state_files import host_id
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.owner import Mesh
from paramd_service.sidecar.parts import SidecarHost
from paramd_service.sidecar.rpc import messages

ANSWER_S = 3.0
"""How long a peer may take: less than the 5 s in which a lost one must be known."""
FRESH_S = 2.0
"""How long answers are repeated, so that callers cannot make this sidecar dial all the time."""
MAX_TRIED = 64
"""Most hosts tried at once."""
CONTROL = -1
"""The control plane's rank in an answer."""


class Reach:
    """Tries the other hosts, one round at a time. Event loop."""

    def __init__(self, host: SidecarHost) -> None:
        self._host = host
        self._looking = asyncio.Lock()
        self._looked_s = -FRESH_S
        self._found: list[pb.ReachedPeer] = []

    async def reach(self, _request: pb.ReachPeersRequest, _timeout_s: float) -> Message:
        async with self._looking:
            if time.monotonic() - self._looked_s >= FRESH_S:
                self._found = await self._look()
                self._looked_s = time.monotonic()
        return pb.ReachPeersResponse(header=messages.header(self._host), peers=self._found)

    async def _look(self) -> list[pb.ReachedPeer]:
        mesh = self._host.mesh
        if mesh is None:
            return []
        # Health needs no ticket; new channels, since a channel in backoff repeats its last error.
        channels = Channels(lambda _rank: "", job_tls=self._host.job_tls)
        try:
            tried = [_tried(channels, rank, address) for rank, address in _others(mesh)]
            return list(await asyncio.gather(*tried))
        finally:
            await channels.close()


def _others(mesh: Mesh) -> Iterator[tuple[int, str]]:
    """The control plane, and the first rank of each other host."""
    if mesh.control_address:
        yield CONTROL, mesh.control_address
    first = {peer.host_id: peer for peer in reversed(mesh.peers)}
    first.pop(host_id(), None)
    found = sorted(first.values(), key=lambda peer: peer.rank)
    yield from ((peer.rank, peer.address) for peer in found[:MAX_TRIED])


async def _tried(channels: Channels, rank: int, address: str) -> pb.ReachedPeer:
    begin_ns, reason = time.monotonic_ns(), ""
    try:
        stub: Any = health_pb2_grpc.HealthStub(channels.channel(address))
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        reason = _why(error)
    except ParamdError as error:
        reason = str(error)
    took_ns = time.monotonic_ns() - begin_ns
    return pb.ReachedPeer(rank=rank, address=address, reason=reason, took_ns=took_ns)


def _why(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {ANSWER_S:.0f} s; is the link cut, or does a firewall drop it?"
    # A peer that answers with any other status speaks gRPC, and so is reached.
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return ""
    if why := why_not_trusted(error):
        return f"it {why}"
    return str(error.details()).rpartition("last error: ")[2][:300]
