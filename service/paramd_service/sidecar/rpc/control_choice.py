"""FollowControl: which control plane this rank follows, and when it follows another."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramd.errors import ConflictError, ParamdError
from paramd.mesh.peers.grpc import Channels
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.rpc.auth import Call, CallTable

ANSWER_S = 1.5
"""How long the control plane may take to say that it serves."""

FRESH_S = 2.0
"""How long the outcome counts: who asks and then stands is not made to wait twice."""

STARTS_S = 15.0
"""How long one that was just followed counts as reached: it has to start first."""


def calls(rank: RankSidecar) -> CallTable:
    """Methods of this subject."""
    return {"FollowControl": Call(request=pb.FollowControlRequest, unary=_Choice(rank).follow)}


class _Choice:
    """One at a time: two candidates are not told of the same moment. Event loop."""

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._choosing = asyncio.Lock()
        self._tried = ("", False, -FRESH_S)
        """Address, whether it was reached, and when."""
        self._starts = ("", 0.0)
        """Address of the one that was followed last, and until when it may start."""

    async def follow(self, request: pb.FollowControlRequest, _timeout_s: float) -> Message:
        rank = self._rank
        if request.incarnation != rank.incarnation:
            raise ConflictError(
                f"the job is in incarnation {rank.incarnation} here, not in {request.incarnation}"
            )
        async with self._choosing:
            address = rank.ready_mesh().control_address
            elected = request.purpose == pb.FOLLOW_PURPOSE_ELECTED
            reached = not elected and await self._reached(address)
            newer = request.generation > rank.control_generation
            again = (request.generation, request.control_address) == (
                rank.control_generation,
                address,
            )
            follows = request.purpose != pb.FOLLOW_PURPOSE_UNSPECIFIED and (
                again or (newer and not reached)
            )
            if follows:
                rank.move_control(request.generation, request.control_address)
                self._starts = (request.control_address, time.monotonic() + STARTS_S)
        return pb.FollowControlResponse(
            header=messages.header(rank),
            follows=follows,
            control_address=rank.ready_mesh().control_address,
            generation=rank.control_generation,
            reached=reached,
        )

    async def _reached(self, address: str) -> bool:
        starts, until_s = self._starts
        came = self._rank.joined_control == address
        if address == starts and time.monotonic() < until_s and not came:
            return True
        tried, reached, at_s = self._tried
        # Only the bad news is remembered: a control plane that was there may be gone.
        if tried != address or reached or time.monotonic() - at_s >= FRESH_S:
            reached = bool(address) and await self._serves(address)
            self._tried = (address, reached, time.monotonic())
        return reached

    async def _serves(self, address: str) -> bool:
        # Health needs no ticket; a new channel, since one in backoff repeats its last error.
        channels = Channels(lambda: "", job_tls=self._rank.job_tls)
        try:
            stub: Any = health_pb2_grpc.HealthStub(channels.channel(address))
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        except (grpc.aio.AioRpcError, ParamdError):
            return False
        finally:
            await channels.close()
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
