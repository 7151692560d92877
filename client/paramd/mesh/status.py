"""Every rank's state, asked of the sidecars themselves."""

from __future__ import annotations

import asyncio
import time

from paramd.errors import ParamdError
from paramd.mesh.results import MeshStatus, RankStatus
from paramd.mesh.sidecars import Sidecars
from paramd.v1 import common_pb2, sidecar_pb2

STATE_TIMEOUT_S = 2.0
"""A sidecar that does not tell its state within this time is shown as unreachable."""

_REASONS = {
    "waiting": "no trainer has attached yet",
    "orphaned": "its trainer has ended; its last step is still served",
    "torn": "its trainer ended inside an update; its parameters are refused",
}


async def mesh_status(sidecars: Sidecars, deadline_s: float) -> MeshStatus:
    """Asks all ranks at once; those that do not answer have a row that says so."""
    document = sidecars.document
    timeout_s = min(STATE_TIMEOUT_S, deadline_s - time.monotonic())
    rows = await asyncio.gather(
        *(_rank_status(sidecars, rank, timeout_s) for rank in range(document.world_size))
    )
    return MeshStatus(rows, job=document.job, epoch=document.epoch, world_size=document.world_size)


async def _rank_status(sidecars: Sidecars, rank: int, timeout_s: float) -> RankStatus:
    peer = sidecars.document.peers.get(rank)
    if peer is None:
        return _silent(rank, "", "its sidecar has not joined")
    try:
        answer = await sidecars.state(rank, timeout_s)
    except ParamdError as error:
        return _silent(rank, peer.address, str(error))
    return rank_status(rank, peer.address, answer)


def rank_status(rank: int, address: str, answer: sidecar_pb2.GetStateResponse) -> RankStatus:
    """A row of what a sidecar answered."""
    state = answer.state
    try:
        phase = common_pb2.Phase.Name(state.phase).removeprefix("PHASE_").lower()
    except ValueError:
        phase = "unknown"  # a newer sidecar's word
    reason = _REASONS.get(phase, state.phase_reason)
    if not reason and not state.agreement_works and state.agreement_reason:
        reason = f"the trainers gave up agreeing: {state.agreement_reason}"
    return RankStatus(
        rank=rank,
        phase=phase,
        step=state.step,
        step_time_s=state.step_time_ns / 1e9,
        stall_total_s=state.stall_total_ns / 1e9,
        stall_count=state.stall_count,
        snapshot_bytes=state.snapshot_bytes,
        arena_bytes=state.arena_bytes,
        address=address,
        reason=reason,
    )


def _silent(rank: int, address: str, reason: str) -> RankStatus:
    return RankStatus(
        rank=rank,
        phase="unreachable",
        step=-1,
        step_time_s=0.0,
        stall_total_s=0.0,
        stall_count=0,
        snapshot_bytes=0,
        arena_bytes=0,
        address=address,
        reason=reason,
    )
