"""InspectTrainer, GetLogged, GetLog: what the trainer is doing, the numbers and lines it logs.

ReachPeers: the hosts that this sidecar's host reaches, and why it does not reach others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramd import state_files
from paramd.errors import ParamdError, UsageError
from paramd.mesh.peers.grpc import Channels, why_not_trusted
from paramd.security.tickets import Role
from paramd.state_files import host_id
from paramd.v1 import sidecar_pb2 as pb
from paramd_service.sidecar.insight.line import Looked
from paramd_service.sidecar.insight.process import (
    MAX_LOG_LINES,
    Tail,
    facts_of,
    last_lines,
    own_tail,
)
from paramd_service.sidecar.owner import Mesh
from paramd_service.sidecar.rank import RankSidecar
from paramd_service.sidecar.rpc import messages
from paramd_service.sidecar.rpc.auth import CALLER, Call, CallTable

MAX_ENTRIES = 1000

_MAY_READ_LOGS = frozenset({Role.EDITOR, Role.CONTROL})
"""Roles that may see what a script prints, which may include secrets."""


def calls(rank: RankSidecar) -> CallTable:
    return {
        "InspectTrainer": Call(unary=partial(_inspect, rank)),
        "GetLogged": Call(unary=partial(_logged, rank)),
        "GetLog": Call(unary=partial(_log, rank)),
        "ReachPeers": Call(unary=_Reach(rank).reach),
    }


async def _inspect(
    rank: RankSidecar, request: pb.InspectTrainerRequest, _timeout_s: float
) -> pb.InspectTrainerResponse:
    if not 0 <= request.log_line_count <= MAX_LOG_LINES:
        raise UsageError(f"log_line_count: {request.log_line_count}; expected 0 to {MAX_LOG_LINES}")
    answer = pb.InspectTrainerResponse(
        header=messages.header(rank), state=messages.rank_state(rank), age_ms=-1
    )
    pid = answer.state.trainer_pid
    if not rank.trainer_lives:
        answer.missing = rank.ownership.value
        return answer
    looked = await rank.insight.look(with_collectives=request.with_collectives)
    _tell_stacks(answer, looked)
    # /proc and the log may be on a disk that does not answer: keep that off the event loop.
    answer.MergeFrom(await asyncio.to_thread(facts_of, pid))
    if request.log_line_count and CALLER.get().role not in _MAY_READ_LOGS:
        answer.log_missing = "what the training prints needs a ticket that may read logs"
    elif request.log_line_count:
        lines, why = await asyncio.to_thread(last_lines, pid, request.log_line_count)
        answer.log_lines.extend(lines)
        answer.log_missing = why
    return answer


def _tell_stacks(answer: pb.InspectTrainerResponse, looked: Looked) -> None:
    stacks = looked.stacks
    answer.activity_kind = stacks.activity.kind
    answer.activity = stacks.activity.what
    answer.activity_where = stacks.activity.where
    answer.age_ms = round(looked.seen_for_s * 1e3)
    answer.overdue = looked.overdue
    answer.source, answer.missing = stacks.source, stacks.missing
    answer.device_bytes = stacks.device_bytes
    answer.collectives_missing = stacks.no_collectives
    answer.threads.extend(stacks.threads)
    answer.collectives.extend(stacks.collectives)


async def _logged(
    rank: RankSidecar, request: pb.GetLoggedRequest, _timeout_s: float
) -> pb.GetLoggedResponse:
    if request.after < 0 or not 0 <= request.limit <= MAX_ENTRIES:
        raise UsageError(f"after, limit: expected 0 or more, and 0 to {MAX_ENTRIES}")
    answer = pb.GetLoggedResponse(header=messages.header(rank))
    numbers = rank.insight.numbers
    answer.count = numbers.count
    limit = request.limit if request.limit else MAX_ENTRIES
    for entry in numbers.after(request.after, limit):
        answer.entries.add(
            number=entry.number, step=entry.step, time_s=entry.time_s, values=entry.values
        )
    return answer


async def _log(
    rank: RankSidecar, request: pb.GetLogRequest, _timeout_s: float
) -> pb.GetLogResponse:
    count = request.line_count
    if not 1 <= count <= state_files.MAX_LOG_LINES:
        raise UsageError(f"line_count: {count}; expected 1 to {state_files.MAX_LOG_LINES}")
    # Before the first attach there is no trainer that could have written anything.
    output = rank.insight.output if rank.has_pins else None

    def tails() -> list[Tail]:
        return [own_tail(count), *(output.tails(count) if output is not None else ())]

    # The files may be on a disk that does not answer: keep that off the event loop.
    found = await asyncio.to_thread(tails)
    answer = pb.GetLogResponse(header=messages.header(rank))
    for source, lines, missing in found:
        answer.logs.add(source=source, lines=lines, missing=missing)
    return answer


ANSWER_S = 3.0
"""How long a peer may take: less than the 5 s in which a lost one must be known."""
FRESH_S = 2.0
"""How long answers are repeated, so that callers cannot make this sidecar dial all the time."""
MAX_TRIED = 64
"""Most hosts tried at once."""
CONTROL = -1
"""The control plane's rank in an answer."""


class _Reach:
    """Tries the other hosts, one round at a time. Event loop."""

    def __init__(self, rank: RankSidecar) -> None:
        self._rank = rank
        self._looking = asyncio.Lock()
        self._looked_s = -FRESH_S
        self._found: list[pb.ReachedPeer] = []

    async def reach(self, _request: pb.ReachPeersRequest, _timeout_s: float) -> Message:
        async with self._looking:
            if time.monotonic() - self._looked_s >= FRESH_S:
                self._found = await self._look()
                self._looked_s = time.monotonic()
        return pb.ReachPeersResponse(header=messages.header(self._rank), peers=self._found)

    async def _look(self) -> list[pb.ReachedPeer]:
        mesh = self._rank.mesh
        if mesh is None:
            return []
        # Health needs no ticket; new channels, since a channel in backoff repeats its last error.
        channels = Channels(lambda _rank: "", job_tls=self._rank.job_tls)
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
